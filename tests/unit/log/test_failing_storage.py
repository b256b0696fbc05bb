"""A disk that fails, and fails again on the way back: the server closes for good, and says so."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

from swift_ft.log.frame import Assembler
from swift_ft.log.manifest import JobMeta
from swift_ft.log.protocol import Fsync
from swift_ft.log.segment import Ending, scan
from swift_ft_services.logserver.append_session import Commits
from swift_ft_services.logserver.core import Refused, StreamState
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.segments import Segment, StorageFailed, StorageFull
from swift_ft_services.logserver.state import AppendCall, EngineConfig, ServerState
from swift_ft_services.logserver.storage import RESERVE, DirectoryStorage
from swift_ft_services.logserver.storage_interface import Write
from tests.sim.server import Unlocked
from tests.unit.log.append_call import Replies
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.storages import (
    FIVE_A_SEGMENT,
    check_frames,
    failing,
    failing_calls,
    files,
    fill,
    firsts,
    frame_in,
    on_disk,
    recovered,
    sequences,
    write,
)

# -- the storage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ({"pwritev": errno.EIO}, "a write failed: Input/output error"),
        (
            {"pwritev": errno.EIO, "ftruncate": errno.EIO},
            "Input/output error, and then it could not be taken back",
        ),
        (
            {"pwritev": errno.ENOSPC, "ftruncate": errno.EIO},
            "No space left on device, and then it could not be taken back",
        ),
    ],
)
def test_after_a_write_that_failed_or_cannot_be_taken_back_nothing_is_written_nor_sealed(
    errors: dict[str, int], words: str, tmp_path: Path
) -> None:
    storage = on_disk(tmp_path / "data", records=1)
    with failing_calls(**errors), pytest.raises(StorageFailed, match=words):
        storage.commit([write(1)], True)
    with pytest.raises(StorageFailed, match=words.partition(",")[0]):
        storage.commit([write(1)], True)
    storage.close()
    (path,) = files(tmp_path / "data")
    assert scan(path).ending is not Ending.SEALED


def test_another_stream_that_cannot_be_taken_back_closes_the_storage(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=1)
    fill(storage, 0, 1, "s1.F")
    real, cuts = os.ftruncate, iter([True, False])

    def write_one(
        fd: int, buffers: Sequence[memoryview], offset: int, real: Callable[..., int] = os.pwritev
    ) -> int:
        if "s1.F" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset)

    def cut_one(fd: int, size: int) -> None:
        if not next(cuts):
            raise OSError(errno.EIO, "Input/output error")
        real(fd, size)

    with (
        mock.patch.multiple(os, pwritev=write_one, ftruncate=cut_one),
        pytest.raises(StorageFailed, match="could not be taken back"),
    ):
        storage.commit([write(1), write(1, "s1.F")], True)
    with pytest.raises(StorageFailed):
        storage.commit([], True)


def test_a_bug_in_a_write_closes_the_storage_too(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=1)

    def broken(self: Segment, sizes: object) -> list[int]:
        raise AssertionError

    with mock.patch.object(Segment, "offsets_of", broken), pytest.raises(AssertionError):
        storage.commit([write(1)], True)
    with pytest.raises(StorageFailed, match="AssertionError"):
        storage.commit([write(1)], True)


def test_a_reserve_that_cannot_be_given_up_is_told_as_the_disks_failure(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data")

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == RESERVE:
            failing(errno.EIO)()

    with (
        failing_calls(pwritev=errno.ENOSPC),
        mock.patch.object(Path, "unlink", unlink),
        pytest.raises(StorageFailed, match="Input/output error"),
    ):
        storage.save(JOB, JobMeta(generation=2))


def with_an_empty_segment(directory: Path) -> DirectoryStorage:
    """Records 0 to 4 fill a segment; for record 5 there was room for the next one's header alone."""
    storage = on_disk(directory, FIVE_A_SEGMENT, records=5)
    real, room = os.pwritev, iter([True, True])  # the footer, the header

    def full(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(room, False):
            return real(fd, buffers, offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(os, "pwritev", full), pytest.raises(StorageFull):
        storage.commit([write(5)], True)
    assert firsts(directory) == [0, 5]
    return storage


def test_a_commit_in_the_midst_of_a_removal_finds_its_segment(tmp_path: Path) -> None:
    storage = with_an_empty_segment(tmp_path / "data")
    real, first = Path.unlink, files(tmp_path / "data")[0]

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == first:
            fill(storage, 5, 6)
        real(path, missing_ok)

    with mock.patch.object(Path, "unlink", unlink):
        assert storage.remove(JOB, STREAM, 5) > 0
    assert firsts(tmp_path / "data") == [5]
    fill(storage, 6, 7)
    check_frames(storage, 5, 7)
    storage.close()
    assert sequences(recovered(tmp_path / "data")) == [5, 6]


def test_what_could_not_be_unlinked_is_unlinked_the_next_time(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", FIVE_A_SEGMENT, records=15)
    real, allowed = Path.unlink, iter([True])

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".seg" and not next(allowed, False):
            raise OSError(errno.EIO, "Input/output error")
        real(path, missing_ok)

    with mock.patch.object(Path, "unlink", unlink), pytest.raises(StorageFailed):
        storage.remove(JOB, STREAM, 15)
    assert firsts(tmp_path / "data") == [5, 10]
    fill(storage, 15, 16)
    assert storage.remove(JOB, STREAM, 15) > 0
    assert firsts(tmp_path / "data") == [15]
    assert frame_in(storage, STREAM, 15) == frame_of(15)[1]


def test_a_drop_that_the_disk_refuses_leaves_the_job_whole(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=2)
    with failing_calls(rename=errno.EIO), pytest.raises(StorageFailed, match="Input/output error"):
        storage.drop(JOB)
    fill(storage, 2, 3)
    check_frames(storage, 0, 3)
    storage.drop(JOB)()
    assert not (tmp_path / "data" / JOB).exists()
    storage.save(JOB, JobMeta(generation=1))  # a later job of that name
    fill(storage, 0, 1)
    assert frame_in(storage, STREAM, 0) == frame_of(0)[1]


def test_a_job_is_dropped_whole_after_an_error_of_what_notes_acknowledgements(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=1)
    with failing_calls(pwrite=errno.EIO):
        fill(storage, 1, 2)  # nobody needs it
    storage.drop(JOB)()
    assert not [path for path in (tmp_path / "data").iterdir() if JOB in path.name]
    storage.save(JOB, JobMeta(generation=1))  # a later job of that name
    fill(storage, 0, 1)
    assert frame_in(storage, STREAM, 0) == frame_of(0)[1]


def test_a_drop_whose_sync_fails_closes_the_storage_and_leaves_what_can_be_read(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=2)
    with failing_calls(fsync=errno.EIO), pytest.raises(StorageFailed, match="a sync failed"):
        storage.drop(JOB)
    assert frame_in(storage, STREAM, 1) == frame_of(1)[1]
    with pytest.raises(StorageFailed, match="a sync failed"):
        storage.commit([write(2)], True)


def test_a_directory_whose_name_is_not_safe_is_not_taken_for_made(tmp_path: Path) -> None:
    """Else records in it would be acknowledged the next time, and be gone with the power."""
    storage = on_disk(tmp_path / "data")
    with failing_calls(fsync=errno.ENOSPC), pytest.raises(StorageFull):
        storage.commit([write(0)], True)
    assert not (tmp_path / "data" / JOB / STREAM).exists()
    synced: list[str] = []
    real = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    with mock.patch.object(os, "fsync", noted):
        fill(storage, 0, 1)
    assert str(tmp_path / "data" / JOB) in synced


# -- the committer ------------------------------------------------------------------------------------


class World:
    """A stream of one writer; ``put`` and ``commit`` do what committer and storage would."""

    def __init__(self) -> None:
        self.state = ServerState(MemoryStorage(), EngineConfig(fsync_interval_s=0.1), Unlocked())
        self.commits = Commits(self.state)
        self.session = AppendCall(Replies(), Assembler(1 << 20))
        self.state.core.fence(JOB, 1)
        stream = self.state.core.open(JOB, STREAM, 1, 0)
        assert isinstance(stream, StreamState)
        self.stream = stream

    def put(self, fsync: Fsync) -> None:
        header, frame = frame_of(self.stream.appended)
        self.state.core.append(self.stream, 1, header)
        self.commits.put(self.session, self.stream, Write(JOB, STREAM, header.sequence, [frame]), fsync)


def test_after_a_failed_sync_no_sync_is_due_any_more() -> None:
    world = World()
    world.put(Fsync.INTERVAL)
    world.commits.committed(world.commits.next_batch(), False, 0.0)
    assert world.commits.next_sync_s(0.0) == pytest.approx(0.1)
    world.commits.gave_up(StorageFailed("a sync failed"), [], 0.2)
    assert world.commits.next_sync_s(0.2) is None
    assert not world.commits.work_to_do


def test_a_full_disk_does_not_stand_for_a_sync_that_was_promised() -> None:
    world = World()
    world.put(Fsync.INTERVAL)
    world.commits.committed(world.commits.next_batch(), False, 0.0)
    target = world.commits.ask_to_settle()
    world.put(Fsync.INTERVAL)
    world.commits.gave_up(StorageFull("no space left"), world.commits.next_batch(), 0.01)
    assert not world.commits.is_settled(target)
    assert world.commits.work_to_do
    batch = world.commits.next_batch()
    assert batch == []
    assert world.commits.sync_due(batch, 0.01)
    world.commits.committed(batch, True, 0.01)
    assert world.commits.is_settled(target)
    assert not world.commits.work_to_do


class Bug(MemoryStorage):
    def commit(self, writes: Sequence[Write], sync: bool) -> None:
        raise RuntimeError("made up")


def test_a_bug_in_a_commit_closes_the_server_and_nobody_waits_for_it() -> None:
    engine = LogEngine(Bug(), EngineConfig())
    health: list[bool] = []
    engine.state.on_health = health.append
    engine.start([])
    engine.administration.fence(JOB, 1)
    session, _ = engine.attach()
    with engine.state.changed:
        stream = engine.state.core.open(JOB, STREAM, 1, 0)
        assert isinstance(stream, StreamState)
        header, frame = frame_of(0)
        engine.state.core.append(stream, 1, header)
        engine.committer.commits.put(session, stream, Write(JOB, STREAM, 0, [frame]), Fsync.ALWAYS)
        engine.state.changed.notify_all()
        assert engine.state.changed.wait_for(lambda: engine.state.failed, 10.0)
    assert "made up" in engine.state.failed
    assert health == [False]
    with pytest.raises(Refused, match="internal error"):
        engine.administration.fence(JOB, 2)
    engine.detach(session)
    engine.drain()
    engine.close()
