"""Bodies of records in the memory of writers on this machine. See `swift_ft.log.shared_memory`.

A writer may change its memory at any time, so a body is verified where it was copied to.
"""

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import crc32c

from swift_ft.errors import RecordInvalid, ServiceError
from swift_ft.log.frame import Bytes, FrameHeader
from swift_ft.log.shared_memory import KEY_BYTES, TAKEN, TIMEOUT_S, is_own

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_RETRY_S = 0.1
_PART_BYTES = 256 << 10
"""Bytes that are copied before their checksum is computed: they are still in the processor's cache then."""


class BodyChanged(ServiceError):
    """A body in a writer's memory is not what its header says."""


class SharedMemory(Protocol):
    """Memory that a writer has handed over."""

    @property
    def size(self) -> int: ...

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fills ``buffer`` from ``offset``. Returns False if it cannot be read."""


@dataclass(slots=True, eq=False)
class SharedBody:
    """The stored body of a frame, in a writer's memory."""

    header: FrameHeader
    memory: SharedMemory
    offset: int
    _crc: int = 0
    """Checksum of the bytes copied so far."""

    def __post_init__(self) -> None:
        """Raises RecordInvalid if it is not inside of the memory."""
        size = self.header.stored_bytes
        if not 0 < size <= self.memory.size - self.offset:
            raise RecordInvalid(
                f"{self.header.key}: {size} bytes at {self.offset} are not in a memory of {self.memory.size}"
            )

    def __len__(self) -> int:
        return self.header.stored_bytes

    def copy(self, begin: int, buffer: memoryview) -> None:
        """Copies the bytes from ``begin`` on into ``buffer``. (Called for one part after the other.) Raises
        BodyChanged; for the last part, if what was copied is not what the header says."""
        header = self.header
        crc = self._crc if begin else 0
        for at in range(0, len(buffer), _PART_BYTES):
            part = buffer[at : at + _PART_BYTES]
            if not self.memory.read_into(self.offset + begin + at, part):
                raise BodyChanged(f"{header.key}: its body cannot be read in its writer's memory")
            crc = crc32c.crc32c(part, crc)
        self._crc = crc
        if begin + len(buffer) == header.stored_bytes and self._crc != header.body_crc:
            raise BodyChanged(f"{header.key}: its body's checksum does not match in its writer's memory")

    def __bytes__(self) -> bytes:
        """Returns a verified copy. Raises BodyChanged."""
        whole = bytearray(len(self))
        self.copy(0, memoryview(whole))
        return bytes(whole)


Part = Bytes | SharedBody
"""Bytes to be written."""


class DescriptorMemory:
    """A writer's memfd. It is read with pread: whatever the writer does to it meanwhile, that raises no signal, as a
    mapping could, and waits for nobody."""

    def __init__(self, descriptor: int) -> None:
        """Owns the descriptor. Raises OSError unless it is a readable memfd that cannot shrink. (A read of another kind
        of file might wait.)"""
        self._descriptor = descriptor
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:  # no other kind of file has these
            raise OSError("not a memfd that is sealed against shrinking")
        self.size = os.fstat(descriptor).st_size
        os.pread(descriptor, 1, 0)

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        try:
            return os.preadv(self._descriptor, [buffer], offset) == len(buffer)
        except OSError:
            return False

    def __del__(self) -> None:
        os.close(self._descriptor)


class MemorySocket:
    """A thread that takes the memory of writers, and the connections of readers to which files are lent."""

    def __init__(
        self, take: Callable[[bytes, SharedMemory], bool], lend: Callable[[bytes, socket.socket], bool]
    ) -> None:
        """``take(key, memory)`` returns whether the memory is taken, for the call that has this key. ``lend(key,
        line)`` takes the connection of the reader whose call has this key, and tells it so; False: there is no such
        call."""
        self._take = take
        self._lend = lend
        self.name = f"swift-ft-log-{os.urandom(8).hex()}"
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                line, _ = self._listener.accept()
            except OSError:  # no descriptor is left, or it is closed
                time.sleep(_RETRY_S)
                continue
            with line, suppress(OSError):
                line.settimeout(TIMEOUT_S)
                if is_own(line):
                    self._receive(line)

    def _receive(self, line: socket.socket) -> None:
        key, descriptors, _, _ = socket.recv_fds(line, KEY_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            readers = line.dup()
            readers.settimeout(TIMEOUT_S)
            if not self._lend(key, readers):
                readers.close()
        elif self._take(key, DescriptorMemory(descriptors[0])):
            line.send(TAKEN)
