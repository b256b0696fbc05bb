"""Reading ahead of a reader: a thread reads the next messages while the last one is verified and sent.

Call sequence of one Read call::

    (handler)   add(record)…, flush()       what is wanted next, in log order
    (thread)    storage.read into page-aligned memory
    (handler)   take()                      checksums, one join: a message; in order

Records that follow each other in a file are read at once, up to a message; a large record is read, and travels, in
several messages.
"""

import errno
from collections import deque
from concurrent import futures
from contextlib import ExitStack
from dataclasses import dataclass

import crc32c

from services.logserver.readmemory import ReadMemory
from services.logserver.seam import Storage
from services.logserver.streams import IndexEntry, StreamState
from swift.errors import LogError, RecordCorrupt
from swift.log.frame import HEADER_BYTES_MAX, FrameHeader, check_body, decode_header
from swift.log.memory import page_aligned
from swift.log.segment import BLOCK_BYTES
from swift.log.wire import Reason, frames_message

_AHEAD = 2
_DAMAGED = {
    *(errno.EIO, errno.EBADMSG, errno.EUCLEAN),
    *(errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO),
}
"""The disk, or a file system's checksum, says that the bytes are lost; or the file is not there, or something else is
in its place. Anything else is the server's own trouble."""
_ANY_BODY_BYTES = 1 << 62  # of what was accepted once, whatever the limit is today


@dataclass(frozen=True, slots=True)
class Wanted:
    """A record that a reader gets."""

    stream: StreamState
    entry: IndexEntry

    @property
    def sequence(self) -> int:
        return self.entry.sequence

    @property
    def frame_bytes(self) -> int:
        return self.entry.frame_bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a record cannot be sent."""

    wanted: Wanted
    reason: str
    kind: Reason = Reason.CORRUPT
    """TRIMMED: it was dropped meanwhile; BUSY: nobody can tell now."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one message has: whole frames that follow each other, or a piece of one frame."""

    frames: tuple[Wanted, ...]
    begin: int
    """Of the first frame."""
    size: int


@dataclass(slots=True)
class _Begun:
    """The frame whose pieces are under way."""

    header: FrameHeader
    crc: int


class ReadAhead:
    """For one reader. A context manager."""

    def __init__(self, storage: Storage, memory: ReadMemory) -> None:
        self._storage = storage
        self._memory = memory
        self._held = ExitStack()
        self._message_bytes = 0  # until something is wanted
        self._run: list[Wanted] = []
        self._run_bytes = 0
        self._waiting: deque[_Part] = deque()
        self._reading: deque[tuple[_Part, futures.Future[memoryview]]] = deque()
        self._begun: _Begun | None = None
        self._thread: futures.ThreadPoolExecutor | None = None
        # One more than is read ahead: the oldest is being sent.
        self._buffers: deque[memoryview] = deque()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._held.close()

    @property
    def is_empty(self) -> bool:
        return not self._reading and not self._waiting

    @property
    def is_full(self) -> bool:
        return len(self._reading) >= _AHEAD

    def add(self, wanted: Wanted) -> None:
        """The record is wanted next. A large one is read in several parts of equal size."""
        if not self._message_bytes:
            self._message_bytes = self._held.enter_context(self._memory.message_bytes())
        part_bytes = self._message_bytes + HEADER_BYTES_MAX
        if self._run_bytes + wanted.frame_bytes > part_bytes or (
            self._run and wanted.sequence != self._run[-1].sequence + 1
        ):
            self.flush()
        if wanted.frame_bytes <= part_bytes:
            self._run.append(wanted)
            self._run_bytes += wanted.frame_bytes
            return
        count = -(-wanted.frame_bytes // self._message_bytes)
        each = -(-wanted.frame_bytes // count)
        for begin in range(0, wanted.frame_bytes, each):
            self._waiting.append(_Part((wanted,), begin, min(each, wanted.frame_bytes - begin)))

    def flush(self) -> None:
        """Reads what was added."""
        if self._run:
            self._waiting.append(_Part(tuple(self._run), 0, self._run_bytes))
            self._run, self._run_bytes = [], 0
        self._go_on()

    def _go_on(self) -> None:
        if self._thread is None and self._waiting:
            self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
            size = (self._message_bytes + HEADER_BYTES_MAX) // BLOCK_BYTES * BLOCK_BYTES + 3 * BLOCK_BYTES
            self._buffers.extend(memoryview(page_aligned(size)) for _ in range(_AHEAD + 1))
        while self._waiting and len(self._reading) < _AHEAD:
            part = self._waiting.popleft()
            assert self._thread is not None
            buffer = self._buffers[0]
            self._buffers.rotate(-1)
            self._reading.append((part, self._thread.submit(self._read, part, buffer)))

    def _read(self, part: _Part, buffer: memoryview) -> memoryview:
        """(the thread) A run that goes on in the next file is read up to there."""
        first = part.frames[0]
        place = self._storage.locate(first.stream.job, first.stream.name, first.sequence)
        size = part.size
        if len(part.frames) > 1:
            size = sum(frame.frame_bytes for frame in part.frames if frame.sequence < place.end_sequence)
        return self._storage.read(place.behind(part.begin), size, buffer)

    def take(self) -> tuple[bytes, Damage | None]:
        """The next message (or none), and what is wrong with the record behind it. Waits for the disk."""
        part, future = self._reading.popleft()
        try:
            view = future.result()
        except OSError as error:
            return b"", _unreadable(part.frames[0], error)
        is_piece = part.size < part.frames[0].frame_bytes
        good, damage = self._piece(part, view) if is_piece else self._frames(part, view)
        message = frames_message([view[:good]], good) if good else b""
        self._go_on()
        return message, damage

    def _frames(self, part: _Part, view: memoryview) -> tuple[int, Damage | None]:
        """(bytes that are sound, what is wrong behind them)."""
        at = 0
        for index, wanted in enumerate(part.frames):
            if index and at == len(view):  # the rest is in the next file
                rest = part.frames[index:]
                self._again(_Part(rest, 0, sum(frame.frame_bytes for frame in rest)))
                return at, None
            frame = view[at : at + wanted.frame_bytes]
            try:
                header = _header(frame, wanted)
                check_body(header, frame[header.header_bytes :])
            except LogError as error:
                return at, Damage(wanted, str(error))
            at += wanted.frame_bytes
        return at, None

    def _again(self, part: _Part) -> None:
        """Comes before what is under way, which is read again behind it."""
        self._waiting.extendleft(reversed([part, *(other for other, _ in self._reading)]))
        for _, future in self._reading:
            future.cancel()
        futures.wait([future for _, future in self._reading])
        self._reading.clear()

    def _piece(self, part: _Part, view: memoryview) -> tuple[int, Damage | None]:
        wanted = part.frames[0]
        try:
            if part.begin == 0:
                self._begun = _Begun(_header(view, wanted), 0)
            begun = self._begun
            assert begun is not None
            if len(view) < part.size:
                raise RecordCorrupt("its file is too short")
            begun.crc = crc32c.crc32c(view[begun.header.header_bytes if part.begin == 0 else 0 :], begun.crc)
            if part.begin + part.size == wanted.frame_bytes and begun.crc != begun.header.body_crc:
                raise RecordCorrupt(f"{begun.header.key}: its body's checksum does not match")
        except LogError as error:
            return 0, Damage(wanted, str(error))
        return len(view), None


def _unreadable(wanted: Wanted, error: OSError) -> Damage:
    if error.errno in _DAMAGED:
        return Damage(wanted, f"it cannot be read: {error.strerror}")
    reason = f"record {wanted.sequence} of {wanted.stream.name} cannot be read now: {error.strerror}"
    return Damage(wanted, reason, Reason.BUSY)


def _header(frame: memoryview, wanted: Wanted) -> FrameHeader:
    """The one that the index means: files can be put in place of others while the server runs, and they are sound."""
    header, entry = decode_header(frame, 0, _ANY_BODY_BYTES), wanted.entry
    is_there = (header.stream_tag, header.sequence, header.key, header.generation, header.frame_bytes)
    is_meant = (wanted.stream.tag, entry.sequence, entry.key, entry.generation, entry.frame_bytes)
    if is_there != is_meant or header.digest != entry.digest:
        raise RecordCorrupt("another record is in its place")
    return header
