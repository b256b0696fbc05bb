"""Bodies in a writer's memory: what is acknowledged was verified in the bytes that were written."""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.frame import FrameHeader, encode_header
from swift_ft.log.segment import scan
from swift_ft.log.shared_memory import PLACE, hand_over, is_near
from swift_ft_services.logserver.shared_memory import BodyChanged, DescriptorMemory, SharedBody
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import Write
from tests.patience import eventually
from tests.shared_bodies import memfd
from tests.unit.log.append_call import Call, HasChannel
from tests.unit.log.frames import STREAM, body_of, frame_of
from tests.unit.log.service import JOB, InProcess
from tests.unit.log.storages import files, on_disk, recovered

SIZE = 1 << 20


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = memfd(SIZE)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[InProcess]:
    with InProcess(on_disk(tmp_path / "data")) as server:
        yield server


class Sharing(Call):
    """An Append call whose memory the server has."""

    def __init__(self, server: HasChannel, memory: int) -> None:
        super().__init__(server)
        self.memory = memory
        self.open()
        assert self.give(memory)

    def give(self, memory: int, key: bytes | None = None) -> bool:
        assert self.welcome is not None
        return hand_over(self.welcome.memory_socket, self.welcome.memory_key if key is None else key, memory)

    def put(self, sequence: int, place: int, body: bytes | None = None) -> None:
        body = body_of(sequence) if body is None else body
        os.pwrite(self.memory, body, place)
        self.name(frame_of(sequence, body=body)[0], place)

    def name(self, header: FrameHeader, place: int) -> None:
        self.say(encode_header(header) + PLACE.pack(place))

    def say(self, shared: bytes) -> None:
        self.raw(log_pb2.AppendRequest(shared=shared).SerializeToString())


def bodies(tmp_path: Path) -> list[bytes]:
    found = []
    for path in files(tmp_path / "data"):
        data = path.read_bytes()
        for record in scan(path).records:
            begin = record.offset + record.header.header_bytes
            found.append(data[begin : begin + record.header.stored_bytes])
    return found


def test_bodies_are_written_from_where_they_lie(server: InProcess, memory: int, tmp_path: Path) -> None:
    call = Sharing(server, memory)
    call.put(0, 4096)
    call.send(frame_of(1)[1])
    call.put(2, SIZE - 24)
    call.until_acked(3)
    call.end()
    assert bodies(tmp_path) == [body_of(0), body_of(1), body_of(2)]


def test_a_body_that_changes_before_it_is_written_is_not_acknowledged(
    server: InProcess, memory: int, tmp_path: Path
) -> None:
    call, other = Sharing(server, memory), Call(server)
    server.engine.administration.fence("other", 1)
    other.ask(job="other")
    other.read(lambda: STREAM in other.opened)
    call.put(0, 0)
    call.until_acked(1)
    header, _ = frame_of(1)
    os.pwrite(memory, body_of(7), 0)
    call.name(header, 0)
    _, reason, message = call.refused()
    assert reason == "corrupt"
    assert "step 1 microbatch 0 slot 0: its body's checksum does not match" in message
    again = Sharing(server, memory)
    assert again.opened == {STREAM: 1}
    again.put(1, 0)
    again.until_acked(2)
    again.end()
    other.send(frame_of(0, job="other")[1])  # another job's writer has not noticed
    other.until_acked(1)
    other.end()
    assert server.engine.state.serves
    assert bodies(tmp_path).count(body_of(1)) == 1
    assert body_of(7) not in bodies(tmp_path)


@pytest.mark.parametrize("place", [SIZE - 23, SIZE, SIZE + 4096, (1 << 64) - 1, (1 << 63) - 24])
def test_a_place_outside_of_the_memory_is_refused(place: int, server: InProcess, memory: int) -> None:
    call = Sharing(server, memory)
    call.name(frame_of(0)[0], place)
    assert call.refused()[1] == "invalid"


def test_what_is_no_frame_in_memory_is_refused(server: InProcess, memory: int) -> None:
    whole = encode_header(frame_of(0)[0]) + PLACE.pack(0)
    empty = encode_header(frame_of(0, body=b"")[0]) + PLACE.pack(0)
    damaged = bytes((*whole[:30], whole[30] ^ 1, *whole[31:]))
    for shared, reason in (
        (whole[:-1], "invalid"),
        (whole[:100], "invalid"),
        (empty, "invalid"),
        (damaged, "corrupt"),
    ):
        call = Sharing(server, memory)
        call.say(shared)
        assert call.refused()[1] == reason, shared
    call = Sharing(server, memory)
    call.send(frame_of(0)[1][:-1])  # within a frame
    call.say(whole)
    assert call.refused()[1] == "invalid"
    call = Call(server)
    call.open()
    call.raw(log_pb2.AppendRequest(shared=whole).SerializeToString())
    _, reason, message = call.refused()
    assert reason == "invalid"
    assert "none was handed over" in message


def test_who_is_near_is_known_without_a_call(server: InProcess) -> None:
    assert is_near(server.engine.state.memory_socket)
    assert not is_near(f"{server.engine.state.memory_socket}x")


def test_memory_is_taken_once_and_with_its_calls_key(server: InProcess, memory: int) -> None:
    call = Sharing(server, memory)
    assert not call.give(memory)
    other = Call(server)
    other.open()
    assert other.welcome is not None
    for key in (b"", b"x" * 16, other.welcome.memory_key + b"x", other.welcome.memory_key[:-1]):
        assert not call.give(memory, key)
    assert not hand_over(f"{other.welcome.memory_socket}x", other.welcome.memory_key, memory)
    call.end()


def write_only() -> int:
    path = f"/proc/self/fd/{memfd()}"
    return os.open(path, os.O_WRONLY)


KINDS: dict[str, Callable[[Path], int]] = {
    "not sealed": lambda path: memfd(seals=0),
    "may shrink": lambda path: memfd(seals=fcntl.F_SEAL_GROW),
    "a file": lambda path: os.open(path / "file", os.O_RDWR | os.O_CREAT),
    "a file in memory": lambda path: os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE),
    "a directory": lambda path: os.open(path, os.O_RDONLY),
    "a pipe": lambda path: os.pipe()[0],
    "a path": lambda path: os.open(path, os.O_PATH),
    "write only": lambda path: write_only(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_descriptors_of_other_kinds_are_not_taken(kind: str, tmp_path: Path) -> None:
    descriptor = KINDS[kind](tmp_path)
    with pytest.raises(OSError, match=r"memfd|Bad file descriptor|Invalid argument"):
        DescriptorMemory(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)  # it is closed


def test_a_server_that_is_sent_nonsense_takes_the_next_writer(server: InProcess, memory: int) -> None:
    name = f"\0{server.engine.state.memory_socket}"
    ends = []
    for send in (
        lambda line: None,
        lambda line: line.send(b"no descriptor"),
        lambda line: socket.send_fds(line, [b"key"], [0, 1, 2]),
        lambda line: line.send(bytes(1 << 16)),
    ):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect(name)
        send(line)
        ends.append(line)
        line.close()
    Sharing(server, memory).end()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_users_memory_is_not_taken_and_not_given(server: InProcess, memory: int) -> None:
    call = Call(server)
    call.open()
    assert call.welcome is not None
    source = f"""
import os, socket, sys
name, key, memory = {call.welcome.memory_socket!r}, {call.welcome.memory_key!r}, {memory}
readable = os.open(f"/proc/self/fd/{{memory}}", os.O_RDONLY)
os.setuid(65534)
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect("\\0" + name)
try:
    socket.send_fds(line, [key], [readable])
    assert line.recv(1) == b""
except OSError:
    pass
"""
    subprocess.run([sys.executable, "-c", source], check=True, pass_fds=[memory])
    strange = f"""
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0swift-ft-test-{os.getpid()}")
listener.listen()
print("ready", flush=True)
line, _ = listener.accept()
assert line.recv(16) == b"", "it got the key"
"""
    with subprocess.Popen([sys.executable, "-c", strange], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not hand_over(f"swift-ft-test-{os.getpid()}", call.welcome.memory_key, memory)
    assert process.returncode == 0
    Sharing(server, memory).end()


def test_a_hole_in_the_memory_is_a_changed_body(server: InProcess, memory: int) -> None:
    call = Sharing(server, memory)
    os.pwrite(memory, body_of(0), 8192)
    subprocess.run(
        ["fallocate", "--punch-hole", "--offset", "0", "--length", str(SIZE), f"/proc/self/fd/{memory}"],
        check=True,
        pass_fds=[memory],
    )
    call.name(frame_of(0)[0], 8192)
    assert call.refused()[1] == "corrupt"


# -- the storage, and a memory that changes while it is read ------------------------------------------------


class Fickle:
    """A memory whose bytes are right until so many were read, and others afterwards."""

    def __init__(self, body: bytes, right: int = 1 << 60) -> None:
        self.body = body
        self.size = len(body)
        self.left = right

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        self.left -= len(buffer)
        found = self.body[offset : offset + len(buffer)]
        buffer[:] = found if self.left >= 0 else bytes(byte ^ 255 for byte in found)
        return True


def shared(sequence: int, body: bytes, memory: Fickle, stream: str = STREAM) -> Write:
    header, frame = frame_of(sequence, body=body, stream=stream)
    return Write(JOB, stream, sequence, [frame[: header.header_bytes], SharedBody(header, memory, 0)])


def begun(path: Path) -> DirectoryStorage:
    return on_disk(path, segment_bytes=64 << 20, records=1)


@pytest.mark.parametrize("size", [1, 4095, 4096, 9_999, (4 << 20) - 100, 9 << 20])
def test_what_is_read_once_is_what_stays(size: int, tmp_path: Path) -> None:
    """The last block of a write is written again by the next one: not from the memory, which has changed."""
    body = os.urandom(1 << 16) * (size // (1 << 16)) + os.urandom(size % (1 << 16))
    storage = begun(tmp_path / "data")
    for sequence in (1, 2):
        memory = Fickle(body, size)
        storage.commit([shared(sequence, body, memory)], True)
        assert memory.left == 0
    storage.commit([shared(3, b"x" * 5000, Fickle(b"x" * 5000))], True)
    storage.close()
    assert bodies(tmp_path)[1:] == [body, body, b"x" * 5000]


@pytest.mark.parametrize("size", [24, 9_999, 9 << 20])
@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_changed_body_leaves_the_file_as_it_was(size: int, part: float, tmp_path: Path) -> None:
    body = os.urandom(size)
    storage = begun(tmp_path / "data")
    before = files(tmp_path / "data")[0].read_bytes().rstrip(b"\0")
    memory = Fickle(body, int(part * size))
    good = shared(1, body, Fickle(body))
    other = shared(0, body, Fickle(body), "s1.F")
    with pytest.raises(BodyChanged, match="step 2 microbatch 0 slot 0: its body's checksum does not match"):
        storage.commit([other, good, shared(2, body, memory)], True)
    assert files(tmp_path / "data")[0].read_bytes().rstrip(b"\0") == before
    storage.commit([good, shared(2, body, Fickle(body)), other], True)
    storage.close()
    assert bodies(tmp_path)[1:] == [body, body]
    assert recovered(tmp_path / "data", "s1.F").appended == 1


def test_memory_is_let_go_with_its_call(server: InProcess, memory: int) -> None:
    def held() -> int:
        return sum("memfd:test" in name for name in map(_target, os.listdir("/proc/self/fd")))

    before = held()
    call = Sharing(server, memory)
    assert held() == before + 1
    call.put(0, 0)
    call.until_acked(1)
    call.end()
    eventually(lambda: held() == before)


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
