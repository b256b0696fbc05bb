"""Records that a reader on the server's machine reads from the server's files."""

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_ft._pb import log_pb2
from swift_ft.errors import RecordCorrupt
from swift_ft.log import admin, reader
from swift_ft.log.reader import ReadFilter
from swift_ft.log.segment import scan
from swift_ft.log.shared_memory import LentFiles, ask_for_files
from swift_ft_services.logserver import reading as server_reading
from swift_ft_services.logserver.reading import Lender, Reading
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.patience import eventually
from tests.unit.log.clients import TIMEOUT_S, following, key, put, reading, value_of, writing
from tests.unit.log.service import JOB, InProcess
from tests.unit.log.storages import on_disk
from tests.unit.log.test_cold import Cold

STEPS = 40
SEGMENT_BYTES = 1500  # some ten records
STREAM = "s0.F"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[InProcess]:
    with InProcess(on_disk(tmp_path / "data", SEGMENT_BYTES)) as server:
        yield server


class Seen:
    """What the server has read itself, and what it has lent."""

    def __init__(self, server: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = self.lent = 0
        read, lend = server.storage.read, Lender.lend

        def counted(*args: Any) -> memoryview:
            self.read += 1
            return read(*args)

        def counted_too(*args: Any) -> tuple[list[log_pb2.Lent], int]:
            found = lend(*args)
            self.lent += found[1]
            return found

        monkeypatch.setattr(server.storage, "read", counted)
        monkeypatch.setattr(Lender, "lend", counted_too)


@pytest.fixture
def seen(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(server, monkeypatch)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record is sent before the reader has asked for files."""

    follow = Reading._follow

    def waiting(self: Reading, job: Any, request: Any, alive: Any, lender: Lender | None) -> Iterator[bytes]:
        eventually(lambda: lender is None or lender.is_ready)
        yield from follow(self, job, request, alive, lender)

    monkeypatch.setattr(Reading, "_follow", waiting)


def filled(server: InProcess, begin: int = 0, end: int = STEPS) -> None:
    with writing(server) as writer:
        for step in range(begin, end):
            put(writer, step)
            if step % 8 == 0:  # a commit is in one file
                writer.flush(TIMEOUT_S)
        writer.flush(TIMEOUT_S)


def take(cursor: reader.StreamCursor, step: int) -> int:
    return value_of(cursor.get(key(step), TIMEOUT_S, lambda: False).body)


def read_all(server: InProcess, begin: int = 0, end: int = STEPS) -> None:
    with reading(server) as log, following(log, STREAM, begin) as cursor:
        assert [take(cursor, step) for step in range(begin, end)] == [100 * s for s in range(begin, end)]


def segments(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data" / JOB / STREAM).glob("*.seg"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("near")
def test_records_come_from_the_servers_files(server: InProcess, seen: Seen, tmp_path: Path) -> None:
    filled(server)
    assert len(segments(tmp_path)) > 2
    with reading(server) as log, following(log, STREAM, 0) as cursor:
        assert [take(cursor, step) for step in range(STEPS)] == [100 * step for step in range(STEPS)]
        filled(server, STEPS, STEPS + 2)  # into a file that is being read
        assert [take(cursor, STEPS + more) for more in range(2)] == [100 * STEPS, 100 * STEPS + 100]
    assert (seen.lent, seen.read) == (STEPS + 2, 0)


@pytest.mark.usefixtures("near")
def test_both_sides_close_what_was_lent(server: InProcess) -> None:
    filled(server)
    with reading(server) as log:
        for number in range(3):
            with following(log, STREAM, 0) as cursor:
                take(cursor, STEPS - 1)
            eventually(lambda: not server.engine.reading._lenders)
            if number == 0:  # the connection is there
                before = descriptors()
        eventually(lambda: descriptors() <= before)


def test_a_reader_elsewhere_gets_records_sent(
    server: InProcess, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "ask_for_files", lambda *_: None)
    filled(server)
    read_all(server)
    assert seen.lent == 0


@pytest.mark.usefixtures("near")
def test_records_of_many_sizes_and_a_share_of_them(server: InProcess, seen: Seen) -> None:
    sizes = random.Random(3).choices([0, 1, 4095, 4096, 70_000, 9 << 20], k=30)
    with writing(server) as writer:
        for number, size in enumerate(sizes):
            writer.append(STREAM, key(0, number), "uint8", (size,), bytes([number]) * size)
        writer.flush(TIMEOUT_S)
    wanted = range(10, 20)
    share = ReadFilter(first=10, behind=20, of=30, below_step=1)
    with reading(server) as log:
        with following(log, STREAM, 0, share) as cursor:
            for number in wanted:
                body = cursor.get(key(0, number), TIMEOUT_S, lambda: False).body
                assert bytes(body) == bytes([number]) * sizes[number]
        with following(log, STREAM, 0) as cursor:
            for number, size in enumerate(sizes):
                assert cursor.get(key(0, number), TIMEOUT_S, lambda: False).body.nbytes == size
    assert seen.lent


@pytest.mark.usefixtures("near")
def test_a_file_that_is_trimmed_while_it_is_lent_is_read_to_its_end(
    server: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(server)
    reads, go = threading.Event(), threading.Event()
    read = LentFiles._read

    def slow(self: LentFiles, *args: Any) -> memoryview:
        reads.set()
        assert go.wait(TIMEOUT_S)
        return read(self, *args)

    monkeypatch.setattr(LentFiles, "_read", slow)
    with reading(server) as log, following(log, STREAM, 0) as cursor:
        assert reads.wait(TIMEOUT_S)
        for path in segments(tmp_path):
            path.unlink()
        go.set()
        assert take(cursor, 0) == 0


def flip(path: Path) -> None:
    data, record = bytearray(path.read_bytes()), scan(path).records[3]
    data[record.offset + record.header.header_bytes] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, scan(path).records[3].offset + 1)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("damage", [flip, cut])
def test_damage_is_the_servers_to_say(
    damage: Callable[[Path], None], server: InProcess, tmp_path: Path, seen: Seen
) -> None:
    filled(server)
    damage(segments(tmp_path)[1])
    with reading(server) as log, following(log, STREAM, 0) as cursor:
        with pytest.raises(RecordCorrupt):
            sum(take(cursor, step) for step in range(STEPS))
    assert seen.lent
    assert seen.read
    (inventory,) = admin.inventory(server.address, JOB, TIMEOUT_S)
    assert inventory.corrupt


def cut_before(path: Path) -> None:
    os.truncate(path, scan(path).records[3].offset)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("where", ["near", "far"])
@pytest.mark.parametrize("damage", [cut_before, empty, Path.unlink])
def test_a_last_file_that_ends_on_a_boundary_or_is_gone_is_damage(
    damage: Callable[[Path], None],
    where: str,
    server: InProcess,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if where == "near":
        request.getfixturevalue("near")
    else:
        monkeypatch.setattr(reader, "ask_for_files", lambda *_: None)
    filled(server)
    damage(segments(tmp_path)[-1])
    with reading(server) as log, following(log, STREAM, 0) as cursor:
        with pytest.raises(RecordCorrupt, match=r"too short|No such file"):
            sum(take(cursor, step) for step in range(STEPS))
    (inventory,) = admin.inventory(server.address, JOB, TIMEOUT_S)
    assert inventory.corrupt


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("more", [0, 100])
def test_records_of_another_stream_in_their_place_are_damage(
    more: int, server: InProcess, tmp_path: Path, seen: Seen
) -> None:
    """Under the same keys, with sound checksums, of the same sizes or larger."""
    with writing(server) as writer:
        for step in range(3):
            put(writer, step)
            writer.append("s0.B", key(step), "uint8", (8 + more,), bytes(8 + more))
        writer.flush(TIMEOUT_S)
    ours = segments(tmp_path)[0]
    ours.write_bytes((ours.parent.parent / "s0.B" / ours.name).read_bytes())
    with reading(server) as log, following(log, STREAM, 0) as cursor:
        with pytest.raises(RecordCorrupt, match="in its place"):
            take(cursor, 0)
    assert seen.lent


def test_records_that_are_others_by_now_are_not_lent(server: InProcess) -> None:
    """A reset comes between the index and the files: under their names there may be other records."""
    filled(server)
    core = server.engine.state.core
    stream = core.jobs[JOB].streams[STREAM]
    run = [stream.by_sequence[number] for number in range(3)]

    class Late(Lender):
        def lend(self, *_: Any) -> tuple[list[log_pb2.Lent], int]:
            server.engine.administration.fence(JOB, 2)
            server.engine.administration.reset(JOB, 2, 1)
            return [log_pb2.Lent(file=1, size=1)], 3

    assert server.engine.reading._lend(core.jobs[JOB], Late(server.storage), stream, run) == ([], run)


def test_another_file_of_the_same_name_is_lent_anew(server: InProcess, tmp_path: Path) -> None:
    filled(server)
    stream = server.engine.state.core.jobs[JOB].streams[STREAM]
    lender, entries = Lender(server.storage), [stream.by_sequence[0]]
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        assert lender.connect(its)
        first = segments(tmp_path)[0]
        files = [lender.lend(stream, entries)[0][0].file for _ in range(2)]
        content = first.read_bytes()
        first.unlink()
        first.write_bytes(content)
        files.append(lender.lend(stream, entries)[0][0].file)
        lender.close()
    assert files == [1, 1, 2]


@pytest.mark.usefixtures("near")
def test_files_that_cannot_be_lent_are_sent(
    server: InProcess, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(server.storage, "descriptor", none_left)
    filled(server)
    read_all(server)
    assert (seen.lent, seen.read > 0) == (0, True)


def test_a_reader_that_takes_no_descriptors_gets_the_records_sent(
    server: InProcess, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not wait for it for long, and serves others meanwhile."""
    monkeypatch.setattr("swift_ft_services.logserver.shared_memory.TIMEOUT_S", 0.1)
    filled(server)
    call = server.stub.Read(log_pb2.ReadRequest(job=JOB, stream=STREAM, near=True, follow=True))
    first = next(call)
    files = ask_for_files(first.file_socket, first.file_key)
    assert files is not None
    files._line.shutdown(socket.SHUT_RD)
    read_all(server)
    filled(server, STEPS, STEPS + 1)
    while not any(reply.frames for reply in call):
        pass
    files.close()
    call.cancel()


def test_who_has_no_such_call_is_lent_nothing(server: InProcess) -> None:
    filled(server)
    call = server.stub.Read(log_pb2.ReadRequest(job=JOB, stream=STREAM, near=True, follow=True))
    first = next(call)
    for wrong in (b"", first.file_key[:-1], first.file_key + b"x", bytes(16)):
        assert ask_for_files(first.file_socket, wrong) is None
    files = ask_for_files(first.file_socket, first.file_key)
    assert files is not None
    assert ask_for_files(first.file_socket, first.file_key) is None, "it has one already"
    files.close()
    call.cancel()
    eventually(lambda: not server.engine.reading._lenders)
    assert ask_for_files(first.file_socket, first.file_key) is None, "the call is over"


def test_a_reader_that_does_not_ask_is_told_of_no_socket(server: InProcess) -> None:
    filled(server)
    replies = list(server.stub.Read(log_pb2.ReadRequest(job=JOB, stream=STREAM)))
    assert not any(reply.file_socket or reply.lent for reply in replies)


@pytest.mark.usefixtures("near")
def test_what_was_moved_is_sent_and_the_rest_is_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = Cold()
    storage = DirectoryStorage(tmp_path / "data", SEGMENT_BYTES, cold=cold.tier)
    storage.recover()
    with InProcess(storage) as server:
        seen = Seen(server, monkeypatch)
        monkeypatch.setattr(server_reading, "_LOOKED_AT_ONCE", 4)
        filled(server)
        moved = storage.move_oldest(JOB)
        assert moved is not None
        read_all(server)
        assert seen.read
        assert 0 < seen.lent <= STEPS - moved[1]
