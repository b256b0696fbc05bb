"""What is left of a record that was mended: nothing, in the files, for other calls, for readers, after a start."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.protocol import Reason
from swift_ft.log.segment import SEGMENT_HEADER_BYTES
from swift_ft_services.logserver.administration import Administration, DiskWatch
from swift_ft_services.logserver.append_session import Appends, Commits
from swift_ft_services.logserver.core import Refused
from swift_ft_services.logserver.disk import RealFile
from swift_ft_services.logserver.engine import Committer
from swift_ft_services.logserver.reading import Reading
from swift_ft_services.logserver.state import EngineConfig, ServerState
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import Place, Write
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.test_mending import BODY, HEADER, Server, flip, mending, replies, segment
from tests.unit.log.test_storage import (
    FIVE_A_SEGMENT,
    FRAME,
    crash,
    files,
    fill,
    frame_in,
    on_disk,
    recovered,
    sequences,
    write,
)


class Started(Server):
    """The parts that decide, on the files of a server that is gone."""

    def __init__(self, directory: Path, segment_bytes: int = 1 << 20) -> None:
        self.files = DirectoryStorage(directory, segment_bytes)
        jobs = self.files.recover()
        self.state = ServerState(self.files, EngineConfig(), threading.Condition())
        self.commits = Commits(self.state)
        self.appends = Appends(self.state, self.commits)
        for job in jobs:
            self.appends.take_over(job, 0.0)
        self.state.core.fence(JOB, 1)

    def commit(self, unmended: bool = False) -> list[str]:
        batch = self.commits.next_batch()
        left = self.files.commit([queued.write for queued in batch], True)
        return [notice.event for notice in self.commits.committed(batch, True, 0.0, left)]


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


def check(directory: Path, count: int) -> None:
    """What the next server finds."""
    found = recovered(directory)
    assert (found.holes, sequences(found), found.appended) == ([], list(range(count)), count)


def damage_header(path: Path) -> None:
    """The segment's own."""
    data = bytearray(path.read_bytes())
    data[20] ^= 4
    path.write_bytes(data)


# -- files ------------------------------------------------------------------------------------------------


def test_a_damaged_segment_header_is_written_again_with_its_first_record(directory: Path) -> None:
    storage = on_disk(directory)
    storage.commit([write(n) for n in range(6)], True)
    crash(storage)
    damage_header(segment(directory))
    server = Started(directory)
    assert server.holes() == [(0, 1), (1, 6)]
    session = server.connect()
    assert server.send(session, *range(6)) == []
    assert server.commit() == ["mended"]
    assert (replies(session)[-1], server.holes()) == (6, [])
    assert [frame_in(server.files, STREAM, n) for n in range(6)] == [frame_of(n)[1] for n in range(6)]
    crash(server.files)
    check(directory, 6)


def test_that_of_a_file_in_the_middle_too(directory: Path) -> None:
    storage = on_disk(directory, FIVE_A_SEGMENT)
    fill(storage, 0, 12)
    storage.close()
    damage_header(files(directory)[1])
    server = Started(directory, FIVE_A_SEGMENT)
    assert server.holes() == [(5, 6), (6, 10)]
    session = server.connect(acked=5)
    server.send(session, *range(5, 12))
    server.commit()
    assert (replies(session)[-1], server.holes()) == (12, [])
    server.send(session, 12)
    server.commit()
    assert [frame_in(server.files, STREAM, n) for n in range(13)] == [frame_of(n)[1] for n in range(13)]
    crash(server.files)
    check(directory, 13)


@pytest.mark.parametrize("end", ["crash", "close"])
@pytest.mark.parametrize("damaged", [(0,), (3,), (5,), (4, 5)], ids=str)
def test_two_things_may_say_that_a_record_is_damaged(
    directory: Path, damaged: tuple[int, ...], end: str
) -> None:
    """In a sealed file what is behind it, and the footer."""
    storage = on_disk(directory)
    storage.commit([write(n) for n in range(6)], True)
    if end == "close":
        storage.close()
    else:
        crash(storage)
    for sequence in damaged:
        flip(segment(directory), sequence, HEADER)
    server = Started(directory)
    session = server.connect(acked=damaged[0])
    server.send(session, *range(damaged[0], 7))
    server.commit()
    assert (replies(session)[-1], server.holes()) == (7, [])
    crash(server.files)
    check(directory, 7)


def test_a_torn_tail_behind_damage_is_cut_off_too(directory: Path) -> None:
    """Records go on in a file of their own: what was left here would be damage at the next start."""
    storage = on_disk(directory)
    storage.commit([write(n) for n in range(6)], True)
    crash(storage)
    path = segment(directory)
    flip(path, 2, BODY)
    path.write_bytes(path.read_bytes()[: SEGMENT_HEADER_BYTES + 6 * FRAME] + frame_of(6)[1][:100])
    server = Started(directory)
    session = server.connect(acked=2)
    server.send(session, *range(2, 8))
    server.commit()
    assert (replies(session)[-1], server.holes()) == (8, [])
    crash(server.files)
    check(directory, 8)


def test_a_file_without_a_footer_before_another_one_is_mended_at_its_end(directory: Path) -> None:
    storage = on_disk(directory)
    fill(storage, 0, 3)
    storage.commit([write(5)], True)
    storage.close()
    server = Started(directory)
    assert server.holes() == [(3, 5)]
    server.send(server.connect(acked=3), 3)
    server.commit()
    crash(server.files)
    server = Started(directory)  # the first file ends with record 3, and has no footer any more
    assert server.holes() == [(4, 5)]
    session = server.connect(acked=4)
    server.send(session, 4)
    server.commit()
    assert (replies(session)[-1], server.holes(), session.refusal) == (6, [], None)
    crash(server.files)
    check(directory, 6)


def test_where_the_first_of_several_begins_the_one_before_it_ends(directory: Path) -> None:
    storage = on_disk(directory, generation=2)
    storage.commit([write(n) for n in range(8)], True)
    crash(storage)
    path = segment(directory)
    flip(path, 2, BODY)
    flip(path, 3, HEADER)
    flip(path, 4, HEADER)
    storage = DirectoryStorage(directory, 1 << 20)
    (job,) = storage.recover()
    assert [(hole.sequence, hole.end_sequence) for hole in job.streams[0].holes] == [(2, 3), (3, 5)]
    before = path.read_bytes()
    lost = mending(3)
    assert storage.commit([lost], True) == [lost], "nobody knows where it ends"
    assert path.read_bytes() == before
    assert storage.commit([mending(2)], True) == []
    crash(storage)
    assert [(hole.sequence, hole.end_sequence) for hole in recovered(directory).holes] == [(3, 5)]


@pytest.mark.parametrize("killed_at", ["resize", "write", "sync"])
def test_a_kill_while_a_smaller_frame_takes_its_place_leaves_no_record_that_never_was(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """The writer's next record is 2, whatever is left of a larger record 1."""
    storage = on_disk(directory)
    large = Write(JOB, STREAM, 1, [frame_of(1, body=bytes(range(1, 251)) * 60)[1]])
    storage.commit([write(0), large], True)
    crash(storage)
    path = segment(directory)
    flip(path, 1, HEADER)
    server = Started(directory)
    server.send(server.connect(acked=1), 1)
    before: list[bytes] = []

    def killed(*_: object) -> None:
        before.append(path.read_bytes())
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(RealFile, killed_at, killed)
        with pytest.raises(Killed):
            server.commit()
    crash(server.files)
    found = recovered(directory)
    assert found.appended == 2
    assert [(hole.sequence, hole.end_sequence) for hole in found.holes] in ([(1, 2)], [])
    if killed_at == "write":  # or any part of it was there
        begin = SEGMENT_HEADER_BYTES + FRAME
        for cut in range(begin, begin + FRAME, 11):
            path.write_bytes(before[0][:begin] + frame_of(1)[1][: cut - begin] + before[0][cut:])
            found = recovered(directory)
            assert [(hole.sequence, hole.end_sequence) for hole in found.holes] == [(1, 2)]
            assert found.appended == 2
    server = Started(directory)
    session = server.connect(acked=1)
    server.send(session, 1, 2)
    server.commit()
    assert (replies(session)[-1], server.holes()) == (3, [])
    crash(server.files)
    check(directory, 3)


def test_an_empty_file_is_not_in_the_way_of_records_that_come_again(directory: Path) -> None:
    """It has the name of a record that was to follow those that are gone."""
    storage = on_disk(directory)
    fill(storage, 0, 3)
    storage._new_segment((JOB, STREAM), 6, sync=False)
    crash(storage)
    server = Started(directory, SEGMENT_HEADER_BYTES + 2 * FRAME)
    assert server.holes() == [(3, 6)]
    session = server.connect(acked=4)
    for sequence in range(4, 9):
        server.send(session, sequence)
        server.commit()
    assert (replies(session)[-1], server.holes()) == (9, [(3, 4)])
    crash(server.files)
    found = recovered(directory)
    assert sequences(found) == [0, 1, 2, *range(4, 9)]
    assert [(hole.sequence, hole.end_sequence) for hole in found.holes] == [(3, 4)]


# -- other calls, and readers ----------------------------------------------------------------------------


def test_what_does_not_fit_ends_the_call_that_waits_for_it() -> None:
    """Another one than sent it: it came when the write was on its way, and shall send again."""
    server = Server(4)
    server.damage(1, 2)
    first = server.connect()
    server.send(first, 0, 1)
    second = server.connect()
    server.send(second, 0, 1, 2, 3)
    server.commit(unmended=True)
    for session in (first, second):
        assert session.refusal is not None
        assert session.refusal.reason is Reason.CORRUPT
    # One that has sent nothing yet, or has what is behind it only, does not wait for it.
    for begin in (None, 3):
        server.send(server.connect(), 0, 1)
        other = server.connect(acked=0 if begin is None else begin)
        if begin is not None:
            server.send(other, begin)
        server.commit(unmended=True)
        assert not other.ended


def test_bytes_that_were_not_granted_leave_nothing_half_taken() -> None:
    server = Server(3)
    server.damage(1, 2)
    session = server.connect()
    session.underway_bytes = server.state.config.writer_bytes_max
    for sequence in (1, 3):
        session.acked.clear()
        with pytest.raises(Refused, match="under way"):
            server.send(session, sequence)
    assert (server.stream.appended, server.commits.next_batch()) == (3, [])
    again = server.connect()
    server.send(again, 1, 2)
    assert server.commit() == ["mended"]
    assert replies(again)[-1] == 3


class Watched(MemoryStorage):
    """Something happens when a record has been read, before anybody has looked at it."""

    def __init__(self) -> None:
        super().__init__()
        self.when_read: dict[int, Callable[[], None]] = {}

    def read(self, place: Place, size: int, buffer: memoryview) -> memoryview:
        found = super().read(place, size, buffer)
        self.when_read.pop(place.end_sequence - 1, lambda: None)()
        return found


def reading(server: Server) -> Reading:
    committer = Committer(server.state, lambda: 0.0)
    watch = DiskWatch(server.state, lambda: None, lambda: 0.0)
    return Reading(
        server.state, Administration(server.state, committer.wait_durable, watch, lambda: 0.0), lambda: 0.0
    )


def spoil(storage: MemoryStorage, sequence: int) -> None:
    frame = bytearray(storage.frames[JOB, STREAM][sequence])
    frame[BODY] ^= 4
    storage.frames[JOB, STREAM][sequence] = bytes(frame)


def test_a_reader_finds_more_damage_while_a_call_waits() -> None:
    server = Server(6)
    server.damage(1, 2)
    session = server.connect()
    server.send(session, *range(6))
    spoil(server.storage, 3)
    with pytest.raises(Refused, match="record 3"):
        list(reading(server).read(log_pb2.ReadRequest(job=JOB, stream=STREAM, from_step=2), lambda: True))
    assert session.refusal is not None
    assert session.refusal.reason is Reason.CORRUPT
    assert server.commit() == ["mended"]
    again = server.connect(acked=1)
    server.send(again, 1, 2, 3, 4, 5)
    assert server.commit() == ["mended"]
    assert (replies(again)[-1], server.holes()) == (6, [])


def test_damage_that_a_reader_finds_holds_up_no_writer_who_was_told() -> None:
    server = Server(4)
    session = server.connect(acked=4)
    server.send(session, 4)
    server.commit()
    spoil(server.storage, 2)
    with pytest.raises(Refused, match="record 2"):
        list(reading(server).read(log_pb2.ReadRequest(job=JOB, stream=STREAM), lambda: True))
    server.send(session, 5)
    server.commit()
    assert (replies(session)[-1], session.ended, server.holes()) == (6, False, [(2, 3)])


def test_a_late_reader_says_nothing_of_a_record_that_was_mended() -> None:
    """It has read the damaged bytes; another one was first, and the writer came back meanwhile."""
    server = Server(0)
    storage = server.storage = Watched()
    server.state.storage = storage
    server.send(server.connect(), *range(4))
    server.commit()
    spoil(storage, 1)

    def mended() -> None:
        server.damage(1, 2)
        server.send(server.connect(), 1)
        assert server.commit() == ["mended"]

    storage.when_read[1] = mended
    request = log_pb2.ReadRequest(job=JOB, stream=STREAM)
    with pytest.raises(Refused, match="record 1") as caught:
        list(reading(server).read(request, lambda: True))
    assert caught.value.refusal.reason is Reason.BUSY
    assert (server.holes(), server.stream.corrupt_reason) == ([], "")
    found = b"".join(reading(server).read(request, lambda: True))
    assert all(frame_of(sequence)[1] in found for sequence in range(4))


def test_what_was_not_mended_is_told(directory: Path) -> None:
    storage = on_disk(directory)
    storage.commit([write(n) for n in range(3)], True)
    lost = mending(7)
    assert storage.commit([mending(1), lost], True) == [lost]
    storage.close()
