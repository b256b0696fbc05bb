"""A record that was sent again, whose first body is damaged: taken, put in its place, and only then acknowledged."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.frame import Assembler
from swift_ft.log.protocol import Reason
from swift_ft.log.segment import SEGMENT_HEADER_BYTES, Ending, walk
from swift_ft_services.logserver.append_session import Appends, Commits
from swift_ft_services.logserver.core import Hole, Refused, StreamState
from swift_ft_services.logserver.disk import RealFile
from swift_ft_services.logserver.state import AppendCall, EngineConfig, ServerState
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import Write
from tests.unit.log.append_call import Call
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import InProcess
from tests.unit.log.test_core import trimmed
from tests.unit.log.test_storage import FRAME, crash, fill, frame_in, on_disk, recovered, sequences, write

LARGE = bytes(range(1, 251)) * 20


class Replies(list[log_pb2.AppendReply | None]):
    def put(self, item: log_pb2.AppendReply | None, /) -> None:
        self.append(item)

    def acked(self) -> list[int]:
        return [acked.durable_sequence for reply in self if reply is not None for acked in reply.acked]


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
        return [(hole.sequence, hole.end_sequence) for hole in self.stream.holes]


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
    with pytest.raises(Refused) as caught:
        server.appends.accept(again, [(header, [memoryview(frame)])])
    assert caught.value.refusal.reason is Reason.CORRUPT


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
    with pytest.raises(Refused) as caught:
        server.appends.accept(server.connect(acked=4), [(header, [memoryview(frame)])])
    assert caught.value.refusal.reason is Reason.CONFLICT
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
    with pytest.raises(Refused) as caught:
        server.appends.accept(server.connect(), [(header, [memoryview(frame)])])
    assert caught.value.refusal.reason is Reason.CONFLICT
    # Nothing is known of a record whose header is damaged, but its key must be free.
    server = Server(3)
    server.damage(1, 2, index=False)
    header, frame = frame_of(1, step=0)
    with pytest.raises(Refused) as caught:
        server.appends.accept(server.connect(), [(header, [memoryview(frame)])])
    assert caught.value.refusal.reason is Reason.CONFLICT
    assert server.holes() == [(1, 2)]


# -- files ------------------------------------------------------------------------------------------------


def mending(sequence: int, generation: int = 2) -> Write:
    return Write(
        JOB, STREAM, sequence, [memoryview(frame_of(sequence, generation=generation)[1])], mends=True
    )


def segment(directory: Path) -> Path:
    return sorted((directory / JOB / STREAM).glob("*.seg"))[0]


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
    found = recovered(directory)
    assert (found.holes, sequences(found), found.appended) == ([], list(range(count)), count)


@pytest.mark.parametrize("sequence", [0, 1, 30, 59])
@pytest.mark.parametrize("how", ["open", "sealed", "started"])
def test_a_damaged_body_is_mended_in_its_place(directory: Path, how: str, sequence: int) -> None:
    """60 frames are two blocks and a half: some lie across two of them."""
    storage = on_disk(directory, generation=2)
    storage.commit([write(n) for n in range(60)], True)
    if how == "sealed":
        storage.close()
        storage = on_disk(directory, generation=2)
    if how == "started":
        crash(storage)
    flip(segment(directory), sequence, BODY)
    if how == "started":
        storage = DirectoryStorage(directory, 1 << 20)
        (job,) = storage.recover()
        assert [hole.sequence for hole in job.streams[0].holes] == [sequence]
    assert storage.commit([mending(sequence), write(60)], True) == []
    check(storage, directory, 61, sequence)
    fill(storage, 61, 63)
    check(storage, directory, 63, sequence)
    storage.close()
    assert recovered(directory).holes == []


@pytest.mark.parametrize("sequence", [0, 1, 58, 59])
def test_a_damaged_header_is_mended_where_its_neighbours_leave_room(directory: Path, sequence: int) -> None:
    storage = on_disk(directory, generation=2)
    storage.commit([write(n) for n in range(60)], True)
    crash(storage)
    flip(segment(directory), sequence, HEADER)
    storage = DirectoryStorage(directory, 1 << 20)
    (job,) = storage.recover()
    assert [(hole.sequence, hole.end_sequence) for hole in job.streams[0].holes] == [(sequence, sequence + 1)]
    large = Write(JOB, STREAM, sequence, [frame_of(sequence, body=LARGE)[1]], mends=True)
    fits = sequence == 59  # nothing is behind it
    before = segment(directory).read_bytes()
    if not fits:
        assert storage.commit([large], True) == [large]
        assert segment(directory).read_bytes() == before
    assert storage.commit([mending(sequence)], True) == []
    fill(storage, 60, 62)
    check(storage, directory, 62, sequence)
    storage.close()
    assert recovered(directory).holes == []


@pytest.mark.parametrize("body", [LARGE, None], ids=["larger", "smaller"])
def test_at_the_end_of_a_file_there_is_room_for_any_frame(directory: Path, body: bytes | None) -> None:
    """As after a change of codec. Nothing of the damaged one is left behind it."""
    storage = on_disk(directory, generation=2)
    frames = [frame_of(0)[1], frame_of(1, body=None if body else LARGE)[1]]
    storage.commit([Write(JOB, STREAM, n, [frame]) for n, frame in enumerate(frames)], True)
    crash(storage)
    flip(segment(directory), 1, HEADER)
    storage = DirectoryStorage(directory, 1 << 20)
    (job,) = storage.recover()
    assert [(hole.sequence, hole.end_sequence) for hole in job.streams[0].holes] == [(1, 2)]
    storage.commit([Write(JOB, STREAM, 1, [frame_of(1, body=body)[1]], mends=True)], True)
    fill(storage, 2, 4)
    crash(storage)
    found = recovered(directory)
    assert (found.holes, sequences(found)) == ([], [0, 1, 2, 3])


def test_what_is_in_no_file_cannot_be_mended(directory: Path) -> None:
    storage = on_disk(directory, generation=2)
    fill(storage, 0, 3)
    lost = mending(7)
    other = Write(JOB, "s9.F", 0, [frame_of(0, stream="s9.F")[1]], mends=True)
    assert storage.commit([lost, other], True) == [lost, other]
    storage.close()


def test_what_somebody_has_removed_cannot_be_mended_and_concerns_nobody_else(directory: Path) -> None:
    storage = on_disk(directory, generation=2)
    fill(storage, 0, 3)
    segment(directory).unlink()
    lost = mending(1)
    for number in range(2):  # its file was still written to, and is not any more
        assert storage.commit([lost, write(number, "s1.F")], True) == [lost]
    storage.close()


def test_records_go_on_behind_a_hole_in_a_file_of_their_own(directory: Path) -> None:
    storage = on_disk(directory, generation=2)
    fill(storage, 0, 3)
    storage.commit([write(5)], True)
    storage.close()
    found = recovered(directory)
    assert [(hole.sequence, hole.end_sequence, hole.gone) for hole in found.holes] == [(3, 5, True)]
    assert sequences(found) == [0, 1, 2, 5]
    # One that its writer has still finds its place at the end of the first file.
    storage = on_disk(directory, generation=2)
    lost = mending(4, 1)
    assert storage.commit([lost], True) == [lost]
    assert storage.commit([mending(3, 1)], True) == []
    assert storage.commit([lost], True) == []
    assert [frame_in(storage, STREAM, n) for n in (2, 3, 4, 5)] == [frame_of(n)[1] for n in (2, 3, 4, 5)]
    storage.close()
    found = recovered(directory)
    assert (found.holes, sequences(found)) == ([], list(range(6)))


def test_it_is_durable_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the policy of what else is written."""
    storage = on_disk(directory, generation=2)
    storage.commit([write(n) for n in range(5)], True)
    storage.close()
    storage = on_disk(directory, generation=2)
    calls: list[str] = []
    for name in ("write", "sync"):
        call = getattr(RealFile, name)

        def watched(file: RealFile, *given: object, name: str = name, call: Any = call) -> None:
            calls.append(name)
            call(file, *given)

        monkeypatch.setattr(RealFile, name, watched)
    storage.commit([mending(2)], False)
    assert calls == ["write", "sync"]
    storage.close()


def test_neighbours_that_cannot_be_read_are_left_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = on_disk(directory, generation=2)
    storage.commit([write(n) for n in range(5)], True)
    flip(segment(directory), 2, BODY)
    storage.close()
    storage = on_disk(directory, generation=2)
    before = segment(directory).read_bytes()

    def unreadable(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(RealFile, "read", unreadable)
        lost = mending(2)
        assert storage.commit([lost], True) == [lost]
    assert segment(directory).read_bytes() == before
    assert storage.commit([mending(2)], True) == []
    check(storage, directory, 5, 2)
    storage.close()


def test_a_kill_in_between_harms_no_neighbour(directory: Path, tmp_path: Path) -> None:
    """Any part of the write may be there, from its first byte on: all others are as they were."""
    storage = on_disk(directory, generation=2)
    storage.commit([write(n) for n in range(60)], True)
    crash(storage)
    path = segment(directory)
    flip(path, 30, BODY)
    before = path.read_bytes()
    storage = DirectoryStorage(directory, 1 << 20)
    storage.recover()
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


# -- a call -----------------------------------------------------------------------------------------------


@pytest.fixture
def directory_server(directory: Path) -> Iterator[InProcess]:
    storage = DirectoryStorage(directory, 1 << 20)
    storage.recover()
    with InProcess(storage) as running:
        yield running


def test_a_reader_finds_damage_and_the_writer_comes_back(
    directory_server: InProcess, directory: Path
) -> None:
    call = Call(directory_server)
    call.open()
    call.send(*(frame_of(sequence)[1] for sequence in range(4)))
    call.until_acked(4)
    flip(segment(directory), 2, BODY)
    reading = directory_server.engine.reading
    request = log_pb2.ReadRequest(job=JOB, stream=STREAM)
    with pytest.raises(Refused, match="record 2"):
        list(reading.read(request, lambda: True))
    again = Call(directory_server)  # it has not heard of the last acknowledgements
    again.open(acked=1)
    again.send(*(frame_of(sequence)[1] for sequence in (1, 2, 3)))
    again.until_acked(4)
    found = b"".join(reading.read(request, lambda: True))
    assert all(frame_of(sequence)[1] in found for sequence in range(4))
    (stream,) = reading.inventory(JOB).streams
    assert (stream.corrupt, stream.records) == (False, 4)
    again.end()
