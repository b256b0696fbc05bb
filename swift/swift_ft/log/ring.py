"""A ring in shared memory: the queue of records from a trainer to its sidecar.

It is a memfd that the sidecar inherits: it has no file name, and the kernel frees it with the last process that has it
open. Native byte order; both ends are processes of one machine and one installation.

    control, 64 KiB       0  magic, 8 capacity, 64 head, 128 tail,
                          192 the head at which to wake the consumer (0: never), 256 the producer waits,
                          320 floor step, 328 resent, 336 the position from which the floor holds,
                          344 bytes per second that the log accepts (0: not known yet), 352 records are urgent,
                          360 when the trainer last renewed its lease (monotonic nanoseconds),
                          384 and 448 counts of records, bytes, verified, each preceded by the tail
                          that they belong to: they change together with it; 512 the servers of copies 0 and 1
       at 4096, 128 each  streams, by number: name [64], acknowledged sequence of each copy [2] (-1: none yet)
    data, `capacity`      records, one after the other, each at a multiple of 64 bytes

    record, 128 bytes     0 length with header and filling, 8 kind (1 record, 2 padding: no record),
                          16 sequence in copy 0 (-1: not sent yet), 24 step, 32 microbatch, 36 slot, 40 stream,
                          44 element type, 45 dimensions, 48 body bytes, 56 sequence in copy 1, 64 shape [8]
    body

``tail <= head <= tail + capacity``; both count bytes from the start of the job. One producer, one consumer. A record
is in the ring once the head has passed it; the head is stored last. It stays until the log has acknowledged it. State
that a successor of a killed consumer needs is here: the sequences assigned to records, stored before they are sent,
and the acknowledged sequence of each stream, stored before the tail.

Each server assigns its own sequences, so both are kept for each of the at most two copies. They are valid only for the
server that holds the copy: `Memory.assign` clears them for another one. A server is identified by a number that the
trainer assigns, a new one each time the server is added.

`ring.cpp` is the producer. Without it (no compiler, or SWIFT_NO_NATIVE=1) the caller copies. That needs x86-64, where
other processors see stores in program order.
"""

import ctypes
import fcntl
import functools
import hashlib
import mmap
import os
import platform
import select
import struct
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from swift_ft.errors import ServiceError, UsageError
from swift_ft.log.placement import COPIES_MAX
from swift_ft.log.record import DIMS_MAX, DTYPE_BY_CODE, DTYPE_BY_NAME, RecordKey

SOURCE = Path(__file__).with_name("ring.cpp")
ENV_OFF = "SWIFT_NO_NATIVE"
ALIGN = 64
HEADER_BYTES = 128
STREAMS_MAX = 480
CONTROL_BYTES = 1 << 16
_STREAMS_AT = 4096
_STREAM_BYTES = 128
_NAME_BYTES = 64
_MAGIC = 0x0001474E49525753  # "SWRING", version 1
_HEADER = struct.Struct("=QQqqIIIBBxxQq8q")
assert _HEADER.size == HEADER_BYTES
_RECORD, _PADDING = 1, 2
_SEQUENCE_AT = (16, 56)
_ACKED_AT = (64, 72)
_NO_SHAPE = (0,) * DIMS_MAX
_MADV_POPULATE_READ = 22


class Word:
    MAGIC, CAPACITY, HEAD, TAIL, WAKE_AT, PRODUCER_WAITS = 0, 8, 64, 128, 192, 256
    FLOOR, RESENT, FLOOR_AT, PACE, URGENT, RENEWED = 320, 328, 336, 344, 352, 360
    COUNTS, SERVERS = (384, 448), (512, 520)


class Counts(NamedTuple):
    """Totals of records that have left the ring: acknowledged records and bytes, and records that were found equal."""

    records: int = 0
    bytes: int = 0
    verified: int = 0


_NONE = Counts()


@functools.cache
def library() -> tuple[ctypes.CDLL, ctypes.PyDLL] | None:
    """Returns `ring.cpp` loaded twice: with calls that release the GIL, and with calls that keep it. None if there is
    no build of this source, or if SWIFT_NO_NATIVE=1."""
    if os.environ.get(ENV_OFF) == "1":
        return None
    path = str(SOURCE.with_name("_ring.so"))
    try:
        waiting, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        waiting.swift_ring_source.restype = ctypes.c_char_p
        if waiting.swift_ring_source() != hashlib.sha256(SOURCE.read_bytes()).hexdigest().encode():
            return None
    except (OSError, AttributeError):
        return None  # missing, or built for another system, or outdated
    quick.swift_ring_open.restype = ctypes.c_void_p
    quick.swift_ring_open.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_int)
    quick.swift_ring_push.restype = ctypes.c_int64
    quick.swift_ring_push.argtypes = (
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_int,
    )
    quick.swift_ring_complete.restype = None
    quick.swift_ring_complete.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    waiting.swift_ring_wait.restype = None
    waiting.swift_ring_wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    waiting.swift_ring_close.restype = None
    waiting.swift_ring_close.argtypes = (ctypes.c_void_p,)
    quick.swift_ring_load.restype = ctypes.c_uint64
    quick.swift_ring_load.argtypes = (ctypes.c_void_p,)
    quick.swift_ring_store.restype = None
    quick.swift_ring_store.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    return waiting, quick


def check_available() -> None:
    if not hasattr(os, "memfd_create"):
        raise UsageError("the log's queue needs memfd_create, which this system does not have; use Linux")
    if library() is None and platform.machine() != "x86_64":
        raise UsageError(
            f"the log's queue needs swift's compiled code on {platform.machine()} processors; install a C++ compiler, "
            f"then swift-ft again, and do not set {ENV_OFF}"
        )


class Memory:
    """The shared memory itself, as either process maps it."""

    def __init__(self, fd: int) -> None:
        """``fd``: a memfd from `create`, which `close` closes. Raises ServiceError if it holds no ring of this
        version."""
        self.fd = fd
        self._map = mmap.mmap(fd, 0)
        self.control = memoryview(self._map)[:CONTROL_BYTES]
        self.data = memoryview(self._map)[CONTROL_BYTES:]
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self._words = self.control.cast("Q")
        self._numbers = self.control.cast("q")
        self.numbers = self.data.cast("q")
        self._library = library()
        self.capacity = self.load(Word.CAPACITY)
        if self.load(Word.MAGIC) != _MAGIC or self.capacity != len(self.data):
            raise ServiceError("this is not a ring, or one of another version")

    @classmethod
    def create(cls, capacity: int) -> "Memory":
        """Creates a ring for ``capacity`` bytes of records and their headers, rounded up to pages. Raises UsageError if
        this machine cannot have it."""
        check_available()
        capacity = -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            return cls._created(capacity)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"the log's queue of {capacity} bytes cannot be had as shared memory (memfd): {error}; allow it, or "
                "give a smaller log_queue_bytes"
            ) from None

    @classmethod
    def _created(cls, capacity: int) -> "Memory":
        fd = os.memfd_create("swift-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, CONTROL_BYTES + capacity)
            # Neither process can shrink or grow the memory that the other one has mapped.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.pwrite(fd, struct.pack("=QQ", _MAGIC, capacity), 0)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def load(self, word: int) -> int:
        if self._library is None:
            return self._words[word // 8]
        return int(self._library[1].swift_ring_load(self.address + word))

    def store(self, word: int, value: int) -> None:
        if self._library is None:
            self._words[word // 8] = value
        else:
            self._library[1].swift_ring_store(self.address + word, value)

    def counts(self) -> Counts:
        while True:
            tail = self.load(Word.TAIL)
            for at in Word.COUNTS:
                if self.load(at) == tail:
                    counted = Counts(*(self.load(at + 8 * index) for index in range(1, 4)))
                    if self.load(at) == tail:
                        return counted

    def set_tail(self, tail: int, counts: Counts) -> None:
        """(consumer) Sets tail and counts atomically: the single store of the tail makes both valid."""
        at = Word.COUNTS[0] if self.load(Word.COUNTS[0]) != self.load(Word.TAIL) else Word.COUNTS[1]
        for index, value in enumerate((tail, *counts)):
            self.store(at + 8 * index, value)
        self.store(Word.TAIL, tail)

    def populate(self) -> None:
        """(consumer) Maps all pages now, so that reading them takes no faults. Waits without the GIL."""
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        libc.madvise(self.address, CONTROL_BYTES + self.capacity, _MADV_POPULATE_READ)

    # -- streams --------------------------------------------------------------------------------------

    def set_stream(self, index: int, name: str) -> None:
        if index >= STREAMS_MAX:
            raise UsageError(f"more than {STREAMS_MAX} streams of one rank cannot be logged")
        at = _STREAMS_AT + index * _STREAM_BYTES
        self.control[at : at + _NAME_BYTES] = name.encode().ljust(_NAME_BYTES, b"\0")
        for copy in range(COPIES_MAX):
            self.set_acked(index, copy, -1)

    def stream(self, index: int) -> str:
        at = _STREAMS_AT + index * _STREAM_BYTES
        return bytes(self.control[at : at + _NAME_BYTES]).rstrip(b"\0").decode()

    def acked(self, index: int, copy: int) -> int:
        """Returns the sequence below which that copy has all records of the stream; -1 if unknown."""
        return self._numbers[_acked_at(index, copy)]

    def set_acked(self, index: int, copy: int, sequence: int) -> None:
        self._numbers[_acked_at(index, copy)] = sequence

    # -- servers --------------------------------------------------------------------------------------

    def assign(self, servers: Collection[int], entries: Iterable["RingEntry"]) -> dict[int, int]:
        """(consumer, at its start) Assigns a copy to each server, its previous one if it had one. Returns server ->
        copy.

        ``entries``: all records in the ring. The state of a copy is cleared before another server gets it.
        """
        free = [copy for copy in range(COPIES_MAX) if self.load(Word.SERVERS[copy]) not in servers]
        held = list(entries) if free else []
        for copy in free:
            self.store(Word.SERVERS[copy], 0)  # if killed after this, the successor clears the copy again
            for entry in held:
                entry.set_sequence(copy, -1)
            for index in range(STREAMS_MAX):
                self._numbers[_acked_at(index, copy)] = -1
        copy_of_server = {
            self.load(Word.SERVERS[copy]): copy for copy in range(COPIES_MAX) if copy not in free
        }
        for server, copy in zip(
            [server for server in servers if server not in copy_of_server], free, strict=False
        ):
            self.store(Word.SERVERS[copy], server)
            copy_of_server[server] = copy
        return copy_of_server

    def close(self) -> None:
        """Unmaps the memory and closes its descriptor. No view of it may be in use."""
        for view in (self._words, self._numbers, self.numbers, self.control):
            view.release()
        self.data.release()
        del self._anchor
        self._map.close()
        os.close(self.fd)


def _acked_at(index: int, copy: int) -> int:
    return (_STREAMS_AT + index * _STREAM_BYTES + _ACKED_AT[copy]) // 8


# -- the trainer's side -------------------------------------------------------------------------------


def header_of(stream: int, key: RecordKey, dtype: str, shape: tuple[int, ...], size: int) -> bytes:
    """Returns a record's header in the ring's format."""
    dims = len(shape)
    return _HEADER.pack(
        -(-(HEADER_BYTES + size) // ALIGN) * ALIGN,
        _RECORD,
        -1,
        key.step,
        key.microbatch,
        key.slot,
        stream,
        DTYPE_BY_NAME[dtype].code,
        dims,
        size,
        -1,
        *shape,
        *_NO_SHAPE[dims:],
    )


def _close_in(process: int, close: Callable[[int], None], handle: int) -> None:
    """Closes a native producer, but not in a forked process, which lacks the thread that closing waits for."""
    if os.getpid() == process:
        close(handle)


class Producer(Protocol):
    """Interface of the single producer. Its calls must not overlap."""

    reserved: int
    """End position of the last record that was pushed."""

    def push(self, header: bytes, address: int, size: int, now: bool) -> int:
        """Adds a record. Returns its end position, or -1 if there is no room now.

        If ``now`` or small, the body is copied before this returns; otherwise it must not change until the head has
        passed that position. Address 0: the caller writes the body later, at `body_at`. Then neither this record nor
        any later one is in the ring before `complete`."""

    def complete(self, position: int) -> None:
        """Declares that all bodies below the position that the caller writes are written. Without this call, these
        records never enter the ring."""

    def wait(self, position: int) -> None:
        """Waits, without the GIL, until the head has passed the position. Takes no longer than the copies do."""

    def close(self) -> None: ...


def body_at(memory: Memory, end: int, size: int) -> int:
    """Returns the offset, in the data area, of the body of the record that ends at this position."""
    total = -(-(HEADER_BYTES + size) // ALIGN) * ALIGN
    return (end - total) % memory.capacity + HEADER_BYTES


def make_padding(memory: Memory, end: int, size: int) -> None:
    """(before the head has passed it) Turns the record that ends at this position into padding: it is never read."""
    memory.numbers[(body_at(memory, end, size) - HEADER_BYTES) // 8 + 1] = _PADDING


def producer(memory: Memory, wake: int) -> Producer:
    """Returns the ring's producer. ``wake``: an eventfd that a sleeping consumer polls."""
    return NativeProducer(memory, wake) if library() is not None else PlainProducer(memory, wake)


class NativeProducer:
    def __init__(self, memory: Memory, wake: int) -> None:
        native = library()
        assert native is not None
        self.reserved = memory.load(Word.HEAD)
        self._waiting, quick = native
        self._push = quick.swift_ring_push
        self._complete = quick.swift_ring_complete
        self._handle: int | None = quick.swift_ring_open(memory.fd, memory.capacity, wake)
        if self._handle is None:
            raise ServiceError(
                f"{memory.capacity} bytes for the log's queue cannot be mapped, or no thread can be started for them; "
                "allow this process more memory, or more threads"
            )
        # Runs before the interpreter frees its memory at the latest: lent bodies are read until then.
        self._finish = weakref.finalize(
            self, _close_in, os.getpid(), self._waiting.swift_ring_close, self._handle
        )

    def push(self, header: bytes, address: int, size: int, now: bool) -> int:
        end: int = self._push(self._handle, header, address, size, now)
        if end >= 0:
            self.reserved = end
        return end

    def complete(self, position: int) -> None:
        self._complete(self._handle, position)

    def wait(self, position: int) -> None:
        self._waiting.swift_ring_wait(self._handle, position)

    def close(self) -> None:
        self._finish()


class PlainProducer:
    """Producer for machines without the library. The caller copies, without the GIL."""

    def __init__(self, memory: Memory, wake: int) -> None:
        self.reserved = self._end = memory.load(Word.HEAD)
        self._memory = memory
        self._wake = wake
        self._elsewhere: deque[tuple[int, int]] = deque()  # (start, end) of the records that are not complete

    def push(self, header: bytes, address: int, size: int, now: bool) -> int:
        """Adds one record: its header, and `size` bytes at `address` (0: the caller writes them later).

        Returns its end position, in bytes since the start of the job, or -1 if there is no room.
        """
        memory = self._memory
        tail = memory.load(Word.TAIL)
        total = -(-(HEADER_BYTES + size) // ALIGN) * ALIGN
        offset = self._end % memory.capacity
        if offset + total > memory.capacity:
            rest = memory.capacity - offset
            if self._end + rest - tail > memory.capacity:
                return -1
            struct.pack_into("=QQ", memory.data, offset, rest, _PADDING)
            self._end, offset = self._end + rest, 0
            self._publish()
        if self._end + total - tail > memory.capacity:
            return -1
        memory.data[offset : offset + HEADER_BYTES] = header
        if size and not address:
            self._elsewhere.append((self._end, self._end + total))
        else:
            ctypes.memmove(memory.address + CONTROL_BYTES + offset + HEADER_BYTES, address, size)
        self._end = self.reserved = self._end + total
        self._publish()
        return self._end

    def complete(self, position: int) -> None:
        while self._elsewhere and self._elsewhere[0][1] <= position:
            self._elsewhere.popleft()
        self._publish()

    def _publish(self) -> None:
        """Advances the head over all complete records, and wakes a sleeping consumer."""
        head = self._elsewhere[0][0] if self._elsewhere else self._end
        if head == self._memory.load(Word.HEAD):
            return
        self._memory.store(Word.HEAD, head)
        if 0 < self._memory.load(Word.WAKE_AT) <= head:
            self._memory.store(Word.WAKE_AT, 0)
            os.eventfd_write(self._wake, 1)

    def wait(self, position: int) -> None:
        assert self._memory.load(Word.HEAD) >= position, "somebody must complete it first"

    def close(self) -> None:
        """Does no work: no copy is ever in progress."""


# -- the sidecar's side -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class RingEntry:
    """A record in the ring. ``body`` is the ring's own memory."""

    memory: Memory
    at: int
    """Offset in the data area."""
    end: int
    """Position of the record's end."""
    index: int
    """Number of its stream."""
    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    body: memoryview

    @property
    def place(self) -> int:
        """Where its body begins in the memory; -1 if it is empty."""
        return CONTROL_BYTES + self.at + HEADER_BYTES if self.body else -1

    def sequence(self, copy: int) -> int:
        """Returns its sequence in that copy; -1 before it was first sent there."""
        return self.memory.numbers[(self.at + _SEQUENCE_AT[copy]) // 8]

    def set_sequence(self, copy: int, value: int) -> None:
        self.memory.numbers[(self.at + _SEQUENCE_AT[copy]) // 8] = value  # one store


class Consumer:
    """The single consumer: `next` reads records, `release` advances the tail.

    Starts at the tail: records that a previous consumer read and did not release are read again.
    """

    def __init__(self, memory: Memory, wake: int) -> None:
        self._memory = memory
        self._wake = wake
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        self.position = memory.load(Word.TAIL)

    def next(self) -> RingEntry | int | None:
        """Returns the next record, the end position of padding, or None if everything was read."""
        if self.position == self._memory.load(Word.HEAD):
            return None
        at = self.position % self._memory.capacity
        length, kind = struct.unpack_from("=QQ", self._memory.data, at)
        self.position += length
        if kind == _PADDING:
            return self.position
        fields = _HEADER.unpack_from(self._memory.data, at)
        step, microbatch, slot, stream, code, dims, size = fields[3:10]
        body = at + HEADER_BYTES
        return RingEntry(
            memory=self._memory,
            at=at,
            end=self.position,
            index=stream,
            key=RecordKey(step, microbatch, slot),
            dtype=DTYPE_BY_CODE[code].name,
            shape=tuple(fields[11 : 11 + dims]),
            body=self._memory.data[body : body + size].toreadonly(),
        )

    def unread_records(self) -> list[RingEntry]:
        """Returns all unread records in the ring, without moving `position`."""
        before, entries = self.position, []
        while (entry := self.next()) is not None:
            if isinstance(entry, RingEntry):
                entries.append(entry)
        self.position = before
        return entries

    @property
    def unread(self) -> int:
        """Bytes that `next` has not read yet."""
        return self._memory.load(Word.HEAD) - self.position

    def sleep(self, timeout_s: float, enough: int = 1) -> None:
        """Sleeps until `enough` bytes are unread or another thread or the producer wakes it, at most `timeout_s`."""
        self._memory.store(Word.WAKE_AT, self.position + enough)
        if self.unread < enough and self._poll.poll(timeout_s * 1000):
            os.eventfd_read(self._wake)
        self._memory.store(Word.WAKE_AT, 0)

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def release(self, position: int, counts: Counts = _NONE) -> bool:
        """Frees everything below the position and adds ``counts``. Returns whether the producer waits for room."""
        if position > self._memory.load(Word.TAIL):
            total = Counts(*(a + b for a, b in zip(self._memory.counts(), counts, strict=True)))
            self._memory.set_tail(position, total)
        waits = bool(self._memory.load(Word.PRODUCER_WAITS))
        if waits:
            self._memory.store(Word.PRODUCER_WAITS, 0)
        return waits
