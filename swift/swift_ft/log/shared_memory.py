"""Records that do not pass gRPC: a writer hands the memory in which they lie to a log server of the same machine, and
the server lends the files in which they lie to a reader.

    (server)  listens on an abstract Unix socket; the first reply of an Append or Read call has its name, and a key for
              this call
    (writer)  `hand_over`: checks whose socket it is, sends the key and a read-only descriptor of its memory
    (server)  checks whose process it is, and that the descriptor is a sealed memfd; answers with one byte
    (writer)  sends a record's header and place instead of its body, which stays there until it is acknowledged

    (reader)  `ask_for_files`: sends the key of its call, and keeps the connection
    (server)  sends a read-only descriptor of each file there, and the places of frames as replies of the call
    (reader)  `LentFiles`: reads the frames, and verifies them as those that the server sends

Whether they are on one machine is found by trying: elsewhere nobody listens under that name. Both must run as the same
user, who may do anything to both of them anyway.
"""

import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent import futures

from swift_ft.log.memory import page_aligned
from swift_ft.log.segment import BLOCK_BYTES

KEY_BYTES = 16
TIMEOUT_S = 1.0
"""Patience of each side with the other one."""
TAKEN = b"\1"
FILE = struct.Struct("<Q")
"""Number of a file that is lent."""
KNOWN = struct.Struct("<QQQII16s")
"""What a server's index knows of a frame that is lent: sequence, generation, step, microbatch, slot, digest."""
PLACE = struct.Struct("<Q")
"""Where a body begins in the memory."""
_PEER = struct.Struct("3i")  # pid, uid, gid


def is_own(line: socket.socket) -> bool:
    """Returns whether the process at the other end runs as this process's user."""
    _, uid, _ = _PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(uid == os.geteuid())


def _connection(name: str) -> socket.socket:
    """Connects to the server that listens under the name. Raises OSError if there is none, or another user's."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(TIMEOUT_S)
        line.connect(f"\0{name}")
        if not is_own(line):
            raise PermissionError("another user's socket")
        return line
    except OSError:
        line.close()
        raise


def is_near(name: str) -> bool:
    """Returns whether the server that listens under the name can take this process's memory and lend its files."""
    try:
        with _connection(name):
            return True
    except OSError:
        return False


def hand_over(name: str, key: bytes, memory: int) -> bool:
    """Gives a descriptor of ``memory``, a sealed memfd, to the server that listens under ``name``. Returns False if
    that is not reachable from here or does not take it: then bodies are sent."""
    try:
        with _connection(name) as line:
            readable = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(line, [key], [readable])
            finally:
                os.close(readable)
            return line.recv(1) == TAKEN
    except OSError:
        return False


def ask_for_files(name: str, key: bytes) -> "LentFiles | None":
    """Asks the server that listens under ``name`` to lend the files that the Read call with this key reads. Returns
    None if that is not reachable from here or does not lend them: then it sends the records."""
    try:
        line = _connection(name)
    except OSError:
        return None
    try:
        line.send(key)
        if line.recv(1) == TAKEN:
            return LentFiles(line)
    except OSError:
        pass
    line.close()
    return None


_PIECE_BYTES = 8 << 20
"""Most bytes that are read at once."""


class LentFiles:
    """(reader) The files that a server lends, one after the other. They are read past the page cache."""

    def __init__(self, line: socket.socket) -> None:
        """Owns the connection on which their descriptors come."""
        self._line = line
        self._number = self._file = -1
        self._thread = futures.ThreadPoolExecutor(1, "log-file")
        self._buffers = [memoryview(b"")] * 2

    def read(self, places: Iterable[tuple[int, int, int]]) -> Iterator[memoryview]:
        """Yields the bytes at these places (number of the file, offset, size), in pieces; a thread reads the next piece
        meanwhile. A file is forgotten once a later one is read. Raises OSError."""
        pieces = deque(
            (number, at, min(_PIECE_BYTES, offset + size - at))
            for number, offset, size in places
            for at in range(offset, offset + size, _PIECE_BYTES)
        )
        size = max((size for *_, size in pieces), default=0) + 2 * BLOCK_BYTES
        if size > len(self._buffers[0]):
            self._buffers = [memoryview(page_aligned(size)) for _ in range(2)]
        following = self._begin(pieces)
        while following is not None:
            data = following.result()
            following = self._begin(pieces)
            yield memoryview(bytes(data))  # the buffers are needed again

    def _begin(self, pieces: deque[tuple[int, int, int]]) -> "futures.Future[memoryview] | None":
        if not pieces:
            return None
        self._buffers.reverse()
        try:
            return self._thread.submit(self._read, self._buffers[0], *pieces.popleft())
        except RuntimeError as error:  # no thread is left
            raise OSError(str(error)) from None

    def _read(self, buffer: memoryview, number: int, offset: int, size: int) -> memoryview:
        while self._number != number:
            self._receive()
        begin = offset // BLOCK_BYTES * BLOCK_BYTES
        skip = offset - begin
        room = buffer[: -(-(skip + size) // BLOCK_BYTES) * BLOCK_BYTES]
        if os.preadv(self._file, [room], begin) < skip + size:
            raise OSError("the file is shorter")
        return buffer[skip : skip + size]

    def _receive(self) -> None:
        number, descriptors, _, _ = socket.recv_fds(self._line, FILE.size, 1, socket.MSG_CMSG_CLOEXEC)
        self._forget()
        if len(number) != FILE.size or not descriptors:
            raise ConnectionError("the server lends no more files")
        (self._number,), (self._file,) = FILE.unpack(number), descriptors

    def _forget(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._number = self._file = -1

    def close(self) -> None:
        self._thread.shutdown()
        self._forget()
        self._line.close()
