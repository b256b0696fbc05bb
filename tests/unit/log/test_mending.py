"""A record that was sent again, whose first body is damaged: taken, put in its place, and only then acknowledged.

Of the damage nothing is left: in the files, for other calls, for readers, after a start."""

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.frame import Assembler
from swift_ft.log.protocol import Reason
from swift_ft.log.segment import SEGMENT_HEADER_BYTES, Ending, walk
from swift_ft_services.logserver.administration import Administration, DiskWatch
from swift_ft_services.logserver.append_session import Appends, Commits
from swift_ft_services.logserver.core import Hole, Refused, StreamState
from swift_ft_services.logserver.disk import RealFile
from swift_ft_services.logserver.engine import Committer
from swift_ft_services.logserver.reading import Reading
from swift_ft_services.logserver.state import AppendCall, EngineConfig, ServerState
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import Place, Write
from tests.unit.log.append_call import Replies, append, refusing
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import InProcess
from tests.unit.log.storages import (
    FIVE_A_SEGMENT,
    FRAME,
    OnDisk,
    check_frames,
    crash,
    failing,
    files,
    fill,
    frame_in,
    left_by_a_kill,
    on_disk,
    recovered,
    reopened,
    sequences,
    spans,
    write,
)
from tests.unit.log.test_core import trimmed

LARGE = bytes(range(1, 251)) * 20


class Server:
    """The parts that decide, and a storage in memory; commits happen when the test says so."""

    def __init__(self, records: int) -> None:
        self.storage = MemoryStorage()
        self.state = ServerState(self.storage, EngineConfig(), threading.Condition())
        self.commits = Commits(self.state)
        self.appends = Appends(self.state, self.commits)
        self.state.core.fence(JOB, 1)
        self.send(self.connect(), *range(records))
        self.commit()

    @property
    def stream(self) -> StreamState:
        return self.state.core.job(JOB).stream(STREAM)

    def connect(self, acked: int = 0, generation: int = 1) -> AppendCall:
        session = AppendCall(Replies(), Assembler(1 << 20))
        self.appends.attach(session)
        opening = log_pb2.Open(job=JOB, stream=STREAM, generation=generation, acked_sequence=acked)
        self.appends.open(session, opening, 0.0)
        return session

    def send(self, session: AppendCall, *sequences: int, generation: int = 1) -> list[int]:
        """What was acknowledged at once."""
        assert isinstance(session.outbox, Replies)
        before = len(session.outbox.acked())
        frames = [frame_of(sequence, generation=generation) for sequence in sequences]
        self.appends.accept(session, [(header, [memoryview(frame)]) for header, frame in frames])
        return session.outbox.acked()[before:]

    def commit(self, unmended: bool = False) -> list[str]:
        batch = self.commits.next_batch()
        writes = [queued.write for queued in batch]
        self.storage.commit(writes, True)
        refused = [write for write in writes if write.mends] if unmended else []
        return [notice.event for notice in self.commits.committed(batch, True, 0.0, refused)]

    def damage(self, begin: int, end: int, *, index: bool = True, gone: bool = False) -> None:
        """As a reader or the start finds it. ``index``: their headers can be read."""
        for sequence in range(begin, end if not index else begin):
            self.stream.remove(self.stream.by_sequence[sequence])
        self.state.space.recount(self.state.core)
        self.stream.insert_hole(Hole(begin, end, end, "a checksum", gone))

    def holes(self) -> list[tuple[int, int]]:
        return spans(self.stream)


def replies(session: AppendCall) -> list[int]:
    assert isinstance(session.outbox, Replies)
    return session.outbox.acked()


@pytest.mark.parametrize("index", [True, False], ids=["body", "header"])
def test_nothing_from_a_damaged_record_on_is_acknowledged_before_it_is_in_its_place(index: bool) -> None:
    server = Server(5)
    server.damage(2, 3, index=index)
    size = server.state.space.job(JOB).used_bytes
    session = server.connect(acked=1)
    assert server.send(session, 1, 2, 3, 4) == [2, 2, 2]
    assert server.holes() == [(2, 3)]
    assert server.commit() == ["mended"]
    assert replies(session)[-1] == 5
    assert server.holes() == []
    assert not server.stream.corrupt_reason
    assert sorted(server.stream.by_sequence) == [0, 1, 2, 3, 4]
    assert server.state.space.job(JOB).used_bytes == size + (0 if index else FRAME) == 5 * FRAME
    assert server.stream.bytes == 5 * FRAME
    server.send(session, 5)
    server.commit()
    assert replies(session)[-1] == 6


def test_several_are_mended_one_by_one() -> None:
    server = Server(6)
    server.damage(1, 4)
    session = server.connect()
    assert server.send(session, 0, 1, 2) == [1]
    server.commit()
    assert (server.holes(), replies(session)[-1]) == ([(3, 4)], 3)
    assert server.send(session, 3, 4) == [3]
    server.commit()
    assert (server.holes(), replies(session)[-1]) == ([], 6)


def test_one_that_is_sent_twice_is_written_once() -> None:
    """Its call broke; the first one is still on its way to the disk."""
    server = Server(3)
    server.damage(1, 2)
    server.send(server.connect(), 0, 1)
    again = server.connect()
    assert server.send(again, 0, 1, 2) == [1, 1, 1]
    assert len(server.commits.next_batch()) == 1
    server.state.core.abandon()
    assert server.send(again, 1) == [], "it was not written: it is taken again"


def test_damage_that_was_acknowledged_long_ago_holds_nobody_up() -> None:
    server = Server(3)
    session = server.connect(acked=3)
    server.damage(1, 2)
    for sequence in (3, 4):
        server.send(session, sequence)
        server.commit()
    assert replies(session)[-1] == 5
    # A new writer numbers its records from the end.
    other = server.connect()
    server.send(other, 5)
    server.commit()
    assert replies(other) == [6]
    assert server.holes() == [(1, 2)]


def test_another_calls_commit_says_nothing_to_one_that_has_sent_nothing_yet() -> None:
    server = Server(3)
    old = server.connect(acked=3)
    server.send(old, 3)
    server.damage(1, 2)
    new = server.connect(acked=1)
    server.commit()
    assert replies(new) == []
    assert server.send(new, 1, 2) == [1]
    server.commit()
    assert replies(new)[-1] == 4


def test_what_does_not_fit_its_place_is_not_acknowledged() -> None:
    server = Server(3)
    server.damage(1, 2)
    session = server.connect()
    server.send(session, 0, 1, 2)
    assert server.commit(unmended=True) == []
    assert session.refusal is not None
    assert session.refusal.reason is Reason.CORRUPT
    assert "record 1" in session.refusal.message
    assert max(replies(session)) == 1
    assert server.holes() == [(1, 2)]
    # A frame of another size, as after a change of codec: nobody needs to ask the disk.
    again = server.connect()
    header, frame = frame_of(1)
    known = server.stream.by_sequence[1]
    server.stream.remove(known)
    server.stream.add(replace(known, frame_bytes=known.frame_bytes + 8))
    with refusing(Reason.CORRUPT):
        server.appends.accept(again, [(header, [memoryview(frame)])])


def test_records_that_are_gone_at_the_end_are_written_anew() -> None:
    """As after a power cut that took what `never` does not promise. What the writer has not any more stays a hole."""
    server = Server(6)
    server.damage(2, 6, index=False, gone=True)
    for sequence in range(2, 6):
        del server.storage.frames[JOB, STREAM][sequence]
    session = server.connect(acked=4)
    server.send(session, 4, 5, 6)
    assert server.stream.appended == 7
    server.commit()
    assert replies(session)[-1] == 7
    assert server.holes() == [(2, 4)]
    assert sorted(server.storage.frames[JOB, STREAM]) == [0, 1, 4, 5, 6]


def test_what_is_refused_gives_nothing_back() -> None:
    server = Server(6)
    server.damage(2, 6, index=False, gone=True)
    header, frame = frame_of(4, step=1)
    with refusing(Reason.CONFLICT):
        server.appends.accept(server.connect(acked=4), [(header, [memoryview(frame)])])
    assert (server.holes(), server.stream.appended) == ([(2, 6)], 6)


def test_a_trimmed_one_is_not_wanted_any_more() -> None:
    server = Server(4)
    server.damage(1, 2, index=False)
    job = server.state.core.job(JOB)
    job.trimmed_below_step = 2
    session = server.connect()
    assert server.send(session, 1, 2) == [4, 4]
    assert server.holes() == []


def test_in_a_hole_among_files_nothing_is_written_behind_the_rest() -> None:
    """Only what is in no file may be: a file that ends with damage has a place for it."""
    server = Server(3)
    server.damage(2, 3, index=False)
    session = server.connect(acked=2)
    assert server.send(session, 2) == []
    assert (server.stream.durable, server.stream.appended) == (3, 3)
    server.commit()
    assert replies(session) == [3]


def test_a_hole_that_was_trimmed_away_takes_nothing() -> None:
    """Whatever step the record says that it is of."""
    server = Server(4)
    server.damage(1, 2, index=False)
    header, frame = frame_of(1, step=50)
    server.appends.accept(server.connect(acked=1), [(header, [memoryview(frame)])])
    trimmed(server.state.core, server.state.core.job(JOB), 3)
    server.commit()
    assert (server.stream.first, sorted(server.stream.by_sequence)) == (3, [3])


def test_a_trim_or_a_reset_may_come_between() -> None:
    for drop in ("trim", "reset"):
        server = Server(4)
        server.damage(1, 2)
        server.send(server.connect(), 0, 1)
        job = server.state.core.job(JOB)
        if drop == "trim":
            trimmed(server.state.core, job, 3)
        else:
            server.state.core.reset(job)
        server.state.space.recount(server.state.core)
        server.commit()
        assert server.holes() == []
        assert sorted(server.stream.by_sequence) == ([3] if drop == "trim" else [])
        assert server.state.space.job(JOB).used_bytes == server.stream.bytes


def test_another_writers_record_is_a_conflict_as_ever() -> None:
    server = Server(3)
    server.damage(1, 2)
    header, frame = frame_of(1, body=b"other bytes, as many: 24")
    with refusing(Reason.CONFLICT):
        server.appends.accept(server.connect(), [(header, [memoryview(frame)])])
    # Nothing is known of a record whose header is damaged, but its key must be free.
    server = Server(3)
    server.damage(1, 2, index=False)
    header, frame = frame_of(1, step=0)
    with refusing(Reason.CONFLICT):
        server.appends.accept(server.connect(), [(header, [memoryview(frame)])])
    assert server.holes() == [(1, 2)]


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
    with refusing(Reason.BUSY, match="record 1"):
        list(reading(server).read(request, lambda: True))
    assert (server.holes(), server.stream.corrupt_reason) == ([], "")
    found = b"".join(reading(server).read(request, lambda: True))
    assert all(frame_of(sequence)[1] in found for sequence in range(4))


# -- files ------------------------------------------------------------------------------------------------


def mending(sequence: int, generation: int = 2) -> Write:
    return Write(
        JOB, STREAM, sequence, [memoryview(frame_of(sequence, generation=generation)[1])], mends=True
    )


def flip(path: Path, sequence: int, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[SEGMENT_HEADER_BYTES + sequence * FRAME + at] ^= 4
    path.write_bytes(data)


BODY, HEADER = FRAME - 2, 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


def check(storage: DirectoryStorage, directory: Path, count: int, mended: int) -> None:
    """All are there, for this server and the next one, and the one that was mended says who sent it."""
    for sequence in range(count):
        wanted = frame_of(sequence, generation=2 if sequence == mended else 1)[1]
        assert frame_in(storage, STREAM, sequence) == wanted, sequence
    check_next_start(directory, count)


def check_next_start(directory: Path, count: int) -> None:
    """What the next server finds."""
    found = recovered(directory)
    assert (found.holes, sequences(found), found.appended) == ([], list(range(count)), count)


@pytest.mark.parametrize("sequence", [0, 1, 30, 59])
@pytest.mark.parametrize("how", ["open", "sealed", "started"])
def test_a_damaged_body_is_mended_in_its_place(directory: Path, how: str, sequence: int) -> None:
    """60 frames are two blocks and a half: some lie across two of them."""
    storage = on_disk(directory, records=60, generation=2)
    if how == "sealed":
        storage.close()
        storage = on_disk(directory)
    if how == "started":
        crash(storage)
    flip(files(directory)[0], sequence, BODY)
    if how == "started":
        storage, found = reopened(directory)
        assert spans(found) == [(sequence, sequence + 1)]
    assert storage.commit([mending(sequence), write(60)], True) == []
    check(storage, directory, 61, sequence)
    fill(storage, 61, 63)
    check(storage, directory, 63, sequence)
    storage.close()
    assert recovered(directory).holes == []


@pytest.mark.parametrize("sequence", [0, 1, 58, 59])
def test_a_damaged_header_is_mended_where_its_neighbours_leave_room(directory: Path, sequence: int) -> None:
    path = left_by_a_kill(directory, 60, generation=2)
    flip(path, sequence, HEADER)
    storage, found = reopened(directory)
    assert spans(found) == [(sequence, sequence + 1)]
    large = Write(JOB, STREAM, sequence, [frame_of(sequence, body=LARGE)[1]], mends=True)
    before = path.read_bytes()
    if sequence != 59:  # something is behind it
        assert storage.commit([large], True) == [large]
        assert path.read_bytes() == before
    assert storage.commit([mending(sequence)], True) == []
    fill(storage, 60, 62)
    check(storage, directory, 62, sequence)
    storage.close()
    assert recovered(directory).holes == []


@pytest.mark.parametrize("body", [LARGE, None], ids=["larger", "smaller"])
def test_at_the_end_of_a_file_there_is_room_for_any_frame(directory: Path, body: bytes | None) -> None:
    """As after a change of codec. Nothing of the damaged one is left behind it."""
    storage = on_disk(directory)
    frames = [frame_of(0)[1], frame_of(1, body=None if body else LARGE)[1]]
    storage.commit([Write(JOB, STREAM, n, [frame]) for n, frame in enumerate(frames)], True)
    crash(storage)
    flip(files(directory)[0], 1, HEADER)
    storage, found = reopened(directory)
    assert spans(found) == [(1, 2)]
    storage.commit([Write(JOB, STREAM, 1, [frame_of(1, body=body)[1]], mends=True)], True)
    fill(storage, 2, 4)
    crash(storage)
    check_next_start(directory, 4)


def test_what_is_in_no_file_cannot_be_mended(directory: Path) -> None:
    storage = on_disk(directory, records=3)
    lost = mending(7)
    other = Write(JOB, "s9.F", 0, [frame_of(0, stream="s9.F")[1]], mends=True)
    assert storage.commit([lost, other], True) == [lost, other]


def test_what_somebody_has_removed_cannot_be_mended_and_concerns_nobody_else(directory: Path) -> None:
    storage = on_disk(directory, records=3)
    files(directory)[0].unlink()
    lost = mending(1)
    for number in range(2):  # its file was still written to, and is not any more
        assert storage.commit([lost, write(number, "s1.F")], True) == [lost]


def test_records_go_on_behind_a_hole_in_a_file_of_their_own(directory: Path) -> None:
    storage = on_disk(directory, records=3)
    storage.commit([write(5)], True)
    storage.close()
    found = recovered(directory)
    assert [(hole.sequence, hole.end_sequence, hole.gone) for hole in found.holes] == [(3, 5, True)]
    assert sequences(found) == [0, 1, 2, 5]
    # One that its writer has still finds its place at the end of the first file.
    storage = on_disk(directory)
    lost = mending(4, 1)
    assert storage.commit([lost], True) == [lost]
    assert storage.commit([mending(3, 1)], True) == []
    assert storage.commit([lost], True) == []
    check_frames(storage, 2, 6)
    storage.close()
    check_next_start(directory, 6)


def test_it_is_durable_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the policy of what else is written."""
    on_disk(directory, records=5).close()
    storage = on_disk(directory)
    calls: list[str] = []
    for name in ("write", "sync"):
        call = getattr(RealFile, name)

        def watched(file: RealFile, *given: object, name: str = name, call: Any = call) -> None:
            calls.append(name)
            call(file, *given)

        monkeypatch.setattr(RealFile, name, watched)
    storage.commit([mending(2)], False)
    assert calls == ["write", "sync"]


def test_neighbours_that_cannot_be_read_are_left_alone(directory: Path) -> None:
    storage = on_disk(directory, records=5, generation=2)
    (path,) = files(directory)
    flip(path, 2, BODY)
    storage.close()
    storage = on_disk(directory)
    before, lost = path.read_bytes(), mending(2)
    with mock.patch.object(RealFile, "read", failing(errno.EIO)):
        assert storage.commit([lost], True) == [lost]
    assert path.read_bytes() == before
    assert storage.commit([mending(2)], True) == []
    check(storage, directory, 5, 2)


def test_a_kill_in_between_harms_no_neighbour(directory: Path, tmp_path: Path) -> None:
    """Any part of the write may be there, from its first byte on: all others are as they were."""
    path = left_by_a_kill(directory, 60)
    flip(path, 30, BODY)
    before = path.read_bytes()
    storage = on_disk(directory)
    storage.commit([mending(30)], True)
    crash(storage)
    after = path.read_bytes()
    changed = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    begin = SEGMENT_HEADER_BYTES + 30 * FRAME
    assert changed
    assert all(begin <= at < begin + FRAME for at in changed)
    torn = tmp_path / "torn" / path.name
    torn.parent.mkdir()
    for cut in range(begin, begin + FRAME, 11):
        torn.write_bytes(after[:cut] + before[cut:])
        found = walk(torn, owner=None)
        sound = [record.header.sequence for record in found.records if not record.damaged]
        assert set(range(60)) - set(sound) <= {30}
        assert found.ending is Ending.CLEAN


# -- a server that starts on what is left --------------------------------------------------------------------


class Started(Server):
    """The parts that decide, on the files of a server that is gone."""

    def __init__(self, directory: Path, segment_bytes: int = 1 << 20) -> None:
        self.files = OnDisk(directory, segment_bytes)
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

    def check_sent_again(self, directory: Path, begin: int, end: int) -> None:
        """A writer that knows of those before; all are there then, also for the next server."""
        session = self.connect(acked=begin)
        self.send(session, *range(begin, end))
        self.commit()
        assert (replies(session)[-1], self.holes(), session.refusal) == (end, [], None)
        crash(self.files)
        check_next_start(directory, end)


class Killed(BaseException):
    """The process ends here."""


def damage_header(path: Path) -> None:
    """The segment's own."""
    data = bytearray(path.read_bytes())
    data[20] ^= 4
    path.write_bytes(data)


def test_a_damaged_segment_header_is_written_again_with_its_first_record(directory: Path) -> None:
    damage_header(left_by_a_kill(directory, 6))
    server = Started(directory)
    assert server.holes() == [(0, 1), (1, 6)]
    session = server.connect()
    assert server.send(session, *range(6)) == []
    assert server.commit() == ["mended"]
    assert (replies(session)[-1], server.holes()) == (6, [])
    check_frames(server.files, 0, 6)
    crash(server.files)
    check_next_start(directory, 6)


def test_that_of_a_file_in_the_middle_too(directory: Path) -> None:
    storage = on_disk(directory, FIVE_A_SEGMENT, records=12)
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
    check_frames(server.files, 0, 13)
    crash(server.files)
    check_next_start(directory, 13)


@pytest.mark.parametrize("end", ["crash", "close"])
@pytest.mark.parametrize("damaged", [(0,), (3,), (5,), (4, 5)], ids=str)
def test_two_things_may_say_that_a_record_is_damaged(
    directory: Path, damaged: tuple[int, ...], end: str
) -> None:
    """In a sealed file what is behind it, and the footer."""
    storage = on_disk(directory, records=6)
    storage.close() if end == "close" else crash(storage)
    for sequence in damaged:
        flip(files(directory)[0], sequence, HEADER)
    Started(directory).check_sent_again(directory, damaged[0], 7)


def test_a_torn_tail_behind_damage_is_cut_off_too(directory: Path) -> None:
    """Records go on in a file of their own: what was left here would be damage at the next start."""
    path = left_by_a_kill(directory, 6)
    flip(path, 2, BODY)
    path.write_bytes(path.read_bytes()[: SEGMENT_HEADER_BYTES + 6 * FRAME] + frame_of(6)[1][:100])
    Started(directory).check_sent_again(directory, 2, 8)


def test_a_file_without_a_footer_before_another_one_is_mended_at_its_end(directory: Path) -> None:
    storage = on_disk(directory, records=3)
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
    check_next_start(directory, 6)


def test_where_the_first_of_several_begins_the_one_before_it_ends(directory: Path) -> None:
    path = left_by_a_kill(directory, 8, generation=2)
    flip(path, 2, BODY)
    flip(path, 3, HEADER)
    flip(path, 4, HEADER)
    storage, found = reopened(directory)
    assert spans(found) == [(2, 3), (3, 5)]
    before = path.read_bytes()
    lost = mending(3)
    assert storage.commit([lost], True) == [lost], "nobody knows where it ends"
    assert path.read_bytes() == before
    assert storage.commit([mending(2)], True) == []
    crash(storage)
    assert spans(recovered(directory)) == [(3, 5)]


@pytest.mark.parametrize("killed_at", ["resize", "write", "sync"])
def test_a_kill_while_a_smaller_frame_takes_its_place_leaves_no_record_that_never_was(
    directory: Path, killed_at: str
) -> None:
    """The writer's next record is 2, whatever is left of a larger record 1."""
    storage = on_disk(directory)
    large = Write(JOB, STREAM, 1, [frame_of(1, body=bytes(range(1, 251)) * 60)[1]])
    storage.commit([write(0), large], True)
    crash(storage)
    (path,) = files(directory)
    flip(path, 1, HEADER)
    server = Started(directory)
    server.send(server.connect(acked=1), 1)
    before: list[bytes] = []

    def killed(*_: object) -> None:
        before.append(path.read_bytes())
        raise Killed

    with mock.patch.object(RealFile, killed_at, killed), pytest.raises(Killed):
        server.commit()
    crash(server.files)
    found = recovered(directory)
    assert found.appended == 2
    assert spans(found) in ([(1, 2)], [])
    if killed_at == "write":  # or any part of it was there
        begin = SEGMENT_HEADER_BYTES + FRAME
        for cut in range(begin, begin + FRAME, 11):
            path.write_bytes(before[0][:begin] + frame_of(1)[1][: cut - begin] + before[0][cut:])
            found = recovered(directory)
            assert spans(found) == [(1, 2)]
            assert found.appended == 2
    Started(directory).check_sent_again(directory, 1, 3)


def test_an_empty_file_is_not_in_the_way_of_records_that_come_again(directory: Path) -> None:
    """It has the name of a record that was to follow those that are gone."""
    storage = on_disk(directory, records=3)
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
    assert spans(found) == [(3, 4)]


# -- a call -----------------------------------------------------------------------------------------------


def test_a_reader_finds_damage_and_the_writer_comes_back(directory: Path) -> None:
    with InProcess(on_disk(directory)) as server:
        append(server, *(frame_of(sequence)[1] for sequence in range(4)))
        flip(files(directory)[0], 2, BODY)
        reading = server.engine.reading
        request = log_pb2.ReadRequest(job=JOB, stream=STREAM)
        with pytest.raises(Refused, match="record 2"):
            list(reading.read(request, lambda: True))
        # It has not heard of the last acknowledgements.
        again = append(server, *(frame_of(sequence)[1] for sequence in (1, 2, 3)), acked=1)
        found = b"".join(reading.read(request, lambda: True))
        assert all(frame_of(sequence)[1] in found for sequence in range(4))
        (stream,) = reading.inventory(JOB).streams
        assert (stream.corrupt, stream.records) == (False, 4)
        again.end()
