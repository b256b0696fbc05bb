"""The cold tier: what is moved is read as before, also after a restart; what goes is removed; a store that fails harms
nothing."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from swift_ft._pb import log_pb2
from swift_ft.errors import UsageError
from swift_ft.log.manifest import MANIFEST, JobMeta, ManifestDamaged, StreamMeta
from swift_ft.objects import Objects
from swift_ft_services.logserver.administration import Tiering
from swift_ft_services.logserver.cold import ColdTier, Stub, stub_path
from swift_ft_services.logserver.quotas import SpaceConfig
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.unit.log.append_call import Call
from tests.unit.log.frames import JOB, STREAM, body_of, frame_of
from tests.unit.log.service import InProcess
from tests.unit.log.test_storage import FIVE_A_SEGMENT, crash, fill, frame_in

URL = "s3://bucket/log"


class Cold:
    """A store that outlives servers, and fails when it is told to."""

    def __init__(self) -> None:
        self.objects = Objects(MemoryStore(), 0.1)
        self.fails = False
        test = self

        class Failing(ColdTier):
            def move(self, key: str, source: object) -> None:
                if test.fails:
                    raise OSError(5, "the store is away")
                super().move(key, source)  # type: ignore[arg-type]

            def read(self, key: str, offset: int, size: int) -> memoryview:
                if test.fails:
                    raise OSError(110, "the object store: it is away")
                return super().read(key, offset, size)

            def remove(self, key: str) -> None:
                if test.fails:
                    raise OSError(5, "the store is away")
                super().remove(key)

        self.tier = Failing(self.objects, URL)

    @property
    def keys(self) -> list[str]:
        return sorted(entry.path for entry in self.objects.entries())


@pytest.fixture
def cold() -> Cold:
    return Cold()


def opened(directory: Path, cold: Cold) -> DirectoryStorage:
    storage = DirectoryStorage(directory, FIVE_A_SEGMENT, cold=cold.tier)
    if not storage.recover():
        storage.save(JOB, JobMeta(generation=1))
    return storage


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / JOB / STREAM).iterdir())


def reads(storage: DirectoryStorage, begin: int, end: int) -> None:
    for sequence in range(begin, end):
        assert frame_in(storage, STREAM, sequence) == frame_of(sequence)[1]


def test_segments_move_one_after_the_other_and_are_read_as_before(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold)
    fill(storage, 0, 16)
    before = [(tmp_path / JOB / STREAM / name).read_bytes() for name in names(tmp_path)[:2]]
    place = storage.locate(JOB, STREAM, 1)
    assert [storage.move_oldest(JOB) for _ in range(2)] == [(STREAM, 5), (STREAM, 10)]
    assert [Path(name).suffix for name in names(tmp_path)] == [".cold", ".cold", ".seg", ".seg"]
    assert [bytes(cold.objects.read_all(key, 1 << 20)) for key in cold.keys] == before
    assert bytes(storage.read(place, 24, memoryview(bytearray(9000)))) == frame_of(1)[1][:24], (
        "located before"
    )
    reads(storage, 0, 16)
    assert storage.move_oldest(JOB) == (STREAM, 15)
    assert storage.move_oldest(JOB) is None, "the last one is written, and small"
    fill(storage, 16, 40)
    reads(storage, 0, 40)
    crash(storage)


def test_a_restart_reads_stubs_and_asks_nothing_of_the_store(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold)
    fill(storage, 0, 17)
    storage.move_oldest(JOB)
    storage.move_oldest(JOB)
    crash(storage)
    cold.fails = True
    again = DirectoryStorage(tmp_path, FIVE_A_SEGMENT, cold=cold.tier)
    ((found,),) = [job.streams for job in again.recover()]
    assert [entry.sequence for entry in found.entries] == list(range(17))
    assert (found.cold_below, found.next_sequence, found.holes) == (10, 17, [])
    with pytest.raises(OSError, match="it is away"):
        frame_in(again, STREAM, 3)
    cold.fails = False
    reads(again, 0, 17)
    fill(again, 17, 22)
    reads(again, 0, 22)
    again.close()


@pytest.mark.parametrize("killed_at", ["upload", "stub", "unlink"])
def test_a_kill_at_any_point_loses_nothing_and_leaves_nothing(
    tmp_path: Path, cold: Cold, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    class Killed(Exception):
        pass

    def kill(*_: object) -> None:
        raise Killed

    storage = opened(tmp_path, cold)
    fill(storage, 0, 12)
    with monkeypatch.context() as patch:
        if killed_at == "upload":  # it is there, and its answer is not
            move = cold.tier.move
            patch.setattr(cold.tier, "move", lambda *words: (move(*words), kill()))
        elif killed_at == "stub":
            patch.setattr("swift_ft_services.logserver.storage.replace_small_file", kill)
        else:
            patch.setattr(storage._disk, "remove", lambda path: kill() if path.suffix == ".seg" else None)
        with pytest.raises(Killed):
            storage.move_oldest(JOB)
    crash(storage)
    again = opened(tmp_path, cold)
    reads(again, 0, 12)
    again.clean_left()
    assert cold.keys == []
    assert again.move_oldest(JOB) == (STREAM, 5)
    reads(again, 0, 12)
    crash(again)


def test_what_is_trimmed_or_dropped_is_removed_there_too_once_the_store_answers(
    tmp_path: Path, cold: Cold
) -> None:
    storage = opened(tmp_path, cold)
    fill(storage, 0, 22)
    for _ in range(4):
        storage.move_oldest(JOB)
    storage.save(JOB, JobMeta(generation=1, streams={STREAM: StreamMeta(10, 22, "")}))
    cold.fails = True
    storage.remove(JOB, STREAM, 10)
    with pytest.raises(OSError, match="away"):
        storage.clean_cold()
    with pytest.raises(FileNotFoundError):
        storage.locate(JOB, STREAM, 4)
    crash(storage)
    cold.fails = False
    storage = opened(tmp_path, cold)  # finds the stubs of what was trimmed
    assert len(cold.keys) == 4
    storage.clean_cold()
    assert len(cold.keys) == 2
    reads(storage, 10, 22)
    assert [name for name in names(tmp_path) if name.endswith(".cold")] == [
        f"{first:020d}.cold" for first in (10, 15)
    ]
    storage.drop(JOB)  # and the process is killed before it removes anything
    crash(storage)
    storage = opened(tmp_path, cold)
    storage.clean_cold()
    assert cold.keys == []
    crash(storage)


def test_a_later_job_of_that_name_keeps_its_stubs(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold)
    fill(storage, 0, 12)
    storage.move_oldest(JOB)
    storage.remove(JOB, STREAM, 5)  # and before its object is gone
    storage.drop(JOB)()
    storage.save(JOB, JobMeta(generation=1))
    fill(storage, 0, 12)
    storage.move_oldest(JOB)
    storage.clean_cold()
    storage.clean_left()
    reads(storage, 0, 12)
    crash(storage)
    storage = opened(tmp_path, cold)
    reads(storage, 0, 12)
    assert len(cold.keys) == 1
    crash(storage)


def test_objects_of_a_quarantined_job_stay(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold)
    fill(storage, 0, 12)
    storage.move_oldest(JOB)
    crash(storage)
    manifest = tmp_path / JOB / MANIFEST
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-3])
    storage = DirectoryStorage(tmp_path, FIVE_A_SEGMENT, cold=cold.tier)
    (job,) = storage.recover()
    assert job.apart
    storage.clean_left()
    storage.clean_cold()
    crash(storage)
    manifest.write_bytes(content)
    storage = opened(tmp_path, cold)
    reads(storage, 0, 12)
    crash(storage)


def test_a_damaged_segment_stays(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold)
    fill(storage, 0, 12)
    path = tmp_path / JOB / STREAM / names(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[400] ^= 1
    path.write_bytes(content)
    assert storage.move_oldest(JOB) is None
    assert cold.keys == []
    crash(storage)


def test_the_store_is_remembered(tmp_path: Path, cold: Cold) -> None:
    crash(opened(tmp_path, cold))
    without = DirectoryStorage(tmp_path, FIVE_A_SEGMENT)
    with pytest.raises(UsageError, match=f"are in an object store: add --cold {URL}"):
        without.recover()
    crash(without)
    other = DirectoryStorage(tmp_path, FIVE_A_SEGMENT, cold=ColdTier(cold.objects, "s3://bucket/other"))
    with pytest.raises(UsageError, match=f"are in {URL}: give that one"):
        other.recover()
    crash(other)
    (tmp_path / ".cold").write_text("x" * 5000)
    damaged = DirectoryStorage(tmp_path, FIVE_A_SEGMENT)
    with pytest.raises(UsageError, match=r"\.cold: it has 5000 bytes, .*: write the URL of the object store"):
        damaged.recover()
    crash(damaged)


def test_a_stub_that_is_damaged_is_no_stub(tmp_path: Path, cold: Cold) -> None:
    stub = Stub(5000, [(0, b"abc"), (4000, b"defg")])
    data = stub.encode()
    again = Stub.decode(data)
    assert (again.size, again.read(0, 9), again.read(4002, 1), again.read(100, 9)) == (
        5000,
        b"abc",
        b"f",
        b"",
    )
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(ManifestDamaged):
            Stub.decode(bytes(damaged))
        with pytest.raises(ManifestDamaged):
            Stub.decode(data[:at])
    storage = opened(tmp_path, cold)
    fill(storage, 0, 12)
    storage.move_oldest(JOB)
    crash(storage)
    path = stub_path(tmp_path / JOB / STREAM / f"{0:020d}.seg")
    path.write_bytes(path.read_bytes()[:-1])
    again_storage = DirectoryStorage(tmp_path, FIVE_A_SEGMENT, cold=cold.tier)
    (job,) = again_storage.recover()
    assert "is damaged: its checksum does not match" in job.apart
    crash(again_storage)


# --- a server ---

QUOTA, BODY = 200_000, 4_000


def eventually(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not done():
        assert time.monotonic() < until
        threading.Event().wait(0.02)


def serving(directory: Path, cold: Cold) -> tuple[InProcess, Tiering]:
    storage = DirectoryStorage(directory, 20_000, cold=cold.tier)
    config = EngineConfig(space=SpaceConfig(quota_bytes=QUOTA))
    server = InProcess(storage, config, jobs=storage.recover())
    tiering = Tiering(server.engine.state, storage, server.engine.watch)
    tiering.start()
    return server, tiering


def send(server: InProcess, begin: int, end: int) -> None:
    """As a writer that waits while the server has no room."""
    for sequence in range(begin, end):
        eventually(lambda: server.engine.state.space.refuses(JOB, BODY + 200) is None)
        call = Call(server)
        call.open()
        call.send(frame_of(sequence, body=body_of(sequence, BODY))[1])
        call.until_acked(sequence + 1)


def frames(server: InProcess) -> bytes:
    request = log_pb2.ReadRequest(job=JOB, stream=STREAM, from_step=0, follow=False)
    return b"".join(reply.frames for reply in server.stub.Read(request))


def test_a_job_of_several_quotas_is_taken_and_read(tmp_path: Path, cold: Cold) -> None:
    server, tiering = serving(tmp_path, cold)
    with server:
        send(server, 0, 120)
        space, tally = server.engine.state.space, server.engine.state.core.jobs[JOB].tally
        assert tally.bytes > 2 * QUOTA
        assert space.server.used_bytes == tally.hot_bytes <= QUOTA
        eventually(lambda: space.server.part() < space.config.low_water)
        assert not space.wants_checkpoint(JOB)
        assert frames(server) == b"".join(
            frame_of(sequence, body=body_of(sequence, BODY))[1] for sequence in range(120)
        )
        tiering.stop()
        hot = tally.hot_bytes
    server, tiering = serving(tmp_path, cold)
    with server:
        assert server.engine.state.core.jobs[JOB].tally.hot_bytes == hot
        assert server.engine.administration.trim(JOB, 110) == 110
        eventually(lambda: len(cold.keys) <= 1)
        server.engine.administration.drop(JOB, force=True)
        eventually(lambda: cold.keys == [])
        assert server.engine.state.space.server.used_bytes == 0
        tiering.stop()


def test_a_flipped_bit_in_an_object_is_damage_of_that_record(tmp_path: Path, cold: Cold) -> None:
    server, tiering = serving(tmp_path, cold)
    with server:
        send(server, 0, 60)
        eventually(lambda: len(cold.keys) >= 2)
        tiering.stop()
        content = bytearray(cold.objects.read_all(cold.keys[0], 1 << 20))
        content[6000] ^= 1
        cold.objects.put(cold.keys[0], content)
        with pytest.raises(Exception, match="checksum does not match"):
            frames(server)


def test_a_large_job_with_nothing_to_move_is_passed_over(
    tmp_path: Path, cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = DirectoryStorage(tmp_path, 20_000, cold=cold.tier)
    with InProcess(
        storage, EngineConfig(space=SpaceConfig(quota_bytes=QUOTA)), jobs=storage.recover()
    ) as server:
        send(server, 0, 24)
        damaged = tmp_path / JOB / STREAM / names(tmp_path)[0]
        content = bytearray(damaged.read_bytes())
        content[6000] ^= 1
        damaged.write_bytes(content)
        server.engine.administration.fence("other", 1)
        monkeypatch.setattr("tests.unit.log.append_call.JOB", "other")
        monkeypatch.setattr("tests.unit.log.test_cold.frame_of", partial(frame_of, job="other"))
        send(server, 0, 15)
        space = server.engine.state.space
        server.engine.watch.check()
        assert space.to_move() == [JOB, "other"]
        tiering = Tiering(server.engine.state, storage, server.engine.watch)
        tiering._move()
        assert space.jobs["other"].used_bytes < space.jobs[JOB].used_bytes / 4
        assert cold.keys
