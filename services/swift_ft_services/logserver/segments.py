"""Segment files of the storage, and the storage's errors."""

import errno
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from swift_ft.errors import ServiceError
from swift_ft.log.frame import Bytes
from swift_ft.log.record import stream_tag
from swift_ft.log.segment import (
    BLOCK_BYTES,
    SEGMENT_HEADER_BYTES,
    Owner,
    SegmentHeader,
    encode_segment_header,
    padding,
)
from swift_ft_services.logserver.disk import NO_SPACE, File
from swift_ft_services.logserver.shared_memory import Part

# One open or sealed segment file: the offsets of its records, and how it grows.

_RESERVE_LEAST = 64 << 10
_RESERVE_STEP = 32 << 20


class Unsound(OSError):
    """A write failed and could not be rolled back: the file's contents are unknown."""


@dataclass(slots=True, eq=False)
class Segment:
    """A file of one stream, with the byte offset of each record (`offsets`)."""

    path: Path
    first: int
    size: int
    """Offset at which its frames end."""
    owner: Owner
    generation: int
    """Generation in which it was created."""
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))  # 0: damaged, offset unknown
    file: File | None = None  # only if not sealed
    tail: bytes = b""
    """Frame bytes in the last, partial block; the next write begins with them."""
    reserved: int = 0
    key: str = ""
    """The object that has its content; then a stub is in its file's place."""
    stays: bool = False
    """It is damaged or gone, so it is not moved there."""
    ahead: bool = True
    """True if the file may have reserved more space than it fills, which is unknown after a restart."""
    _end: int = SEGMENT_HEADER_BYTES
    """End of the frames found so far."""

    @property
    def cold(self) -> bool:
        return bool(self.key)

    @property
    def of(self) -> tuple[bytes, int]:
        """Identifies its stream, also if another job of that name is created later."""
        return bytes.fromhex(self.owner.uid), stream_tag(self.owner.job, self.owner.stream)

    @property
    def header(self) -> SegmentHeader:
        of = self.owner
        return SegmentHeader(of.job, of.stream, self.first, of.uid, self.generation)

    @property
    def next_sequence(self) -> int:
        return self.first + len(self.offsets)

    def found(self, sequence: int, offset: int, size: int) -> None:
        """(at the start, in order) Records a frame that the scan found. The first missing record before it is assumed
        to begin where the previous frame ended."""
        missing = sequence - self.next_sequence
        self.offsets.extend([self._end, *[0] * missing][:missing])
        self.offsets.append(offset)
        self._end = offset + size

    def mend(self, file: File, sequence: int, frame: Sequence[Bytes]) -> bool:
        """Writes a record's frame over its damaged copy. Returns False, with nothing written, if it does not fit or if
        data sharing its blocks cannot be read. Intact data stays intact if this is interrupted."""
        index, size = sequence - self.first, sum(map(len, frame))
        if index == len(self.offsets):  # the file ends with damage in which no frame was found
            begin, frames = self.size, frame
            if not self.size:  # its own header is damaged, too
                head = encode_segment_header(self.header)
                begin, frames = len(head), [head, *frame]
            if not _overwrite(file, self.size, frames, last=True):
                return False
            self.offsets.append(begin)
            self.size = begin + size
            return True
        offset = self.offsets[index]
        behind = self.offsets[index + 1] if index + 1 < len(self.offsets) else self.size
        return bool(offset) and behind == offset + size and _overwrite(file, offset, frame)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def offsets_of(self, sizes: Iterable[int]) -> list[int]:
        ends = accumulate(sizes, initial=self.size)
        return list(ends)[:-1]

    def write(self, parts: Sequence[Part]) -> None:
        """Appends bytes. If it raises, the segment is unchanged, unless it raises Unsound; after BodyChanged the caller
        goes back."""
        assert self.file is not None
        begin = self.size - len(self.tail)
        end = self.size + sum(map(len, parts))
        if end + BLOCK_BYTES > self.reserved:
            self._reserve(end + BLOCK_BYTES)
        try:
            last = self.file.write(begin, [self.tail, *parts, padding(end)])
        except OSError as error:
            self._cut(self.size, error)
            raise
        self.tail = last[: end % BLOCK_BYTES]
        self.size = end

    def _reserve(self, size: int) -> None:
        assert self.file is not None
        # Doubles the reservation: a file is extended a few times, and a small one takes little.
        self.ahead = True
        ample = size + min(max(size, _RESERVE_LEAST), _RESERVE_STEP)
        try:
            self.file.reserve(ample)
            self.reserved = ample
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._cut(self.size, error)  # frees what was partly reserved
            self.file.reserve(size)
            self.reserved = size

    def give_back(self) -> None:
        """Frees the reserved space after the written data. The next write reserves some again."""
        if self.file is not None and self.ahead:
            self.file.resize(self.file.size)
            self.reserved, self.ahead = 0, False

    def go_back(self, size: int, tail: bytes) -> None:
        """Rolls back to before writes that failed. Raises Unsound."""
        self._cut(size)
        self.size, self.tail = size, tail

    def _cut(self, size: int, why: OSError | None = None) -> None:
        assert self.file is not None
        try:
            self.file.resize(size)
        except OSError as error:
            first = error if why is None else why
            raise Unsound(first.errno, f"{first.strerror}, and then it could not be taken back") from error
        self.reserved = 0


def place_of(segments: Sequence[Segment], sequence: int) -> Segment | None:
    """Returns the segment that has this record, or that ends with damage at its place."""
    for segment in reversed(segments):
        if segment.first <= sequence < segment.next_sequence:
            return segment
        if sequence == segment.next_sequence and (segment.file is None or segment is not segments[-1]):
            return segment
    return None


def _overwrite(file: File, offset: int, frame: Sequence[Bytes], *, last: bool = False) -> bool:
    """Writes a frame in place; data sharing its first and last block is kept. ``last``: the file is cut off after the
    frame, before the write, because damage after an intact frame would look like another record. The damaged frame
    itself still shows that a record was there."""
    begin, end = offset // BLOCK_BYTES * BLOCK_BYTES, offset + sum(map(len, frame))
    try:
        before = file.read(begin, offset - begin)
        behind = b"" if last else file.read(end, -end % BLOCK_BYTES)
    except OSError:
        return False
    if len(before) < offset - begin:
        return False
    if last and file.size > end:
        file.resize(end)
    file.write(begin, [before, *frame, behind, padding(end + len(behind))])
    return True


BUSY = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
IN_THE_WAY = {
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.ENXIO,
}
"""Errors that mean that something else is in the place of a job's file or directory. They concern this job, not the
disk."""
UNREADABLE = {errno.EACCES, errno.EPERM, errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""Errors of reading a file that concern only this job's files."""


class StorageError(ServiceError):
    """Base class of the storage's errors."""


class StorageFull(StorageError):
    """No space is left. Everything is rolled back to the last record boundary; reads and trims still work."""


class StorageBusy(StorageError):
    """The process is out of descriptors or memory. Everything is rolled back to the last record boundary."""


class StorageFailed(StorageError):
    """A write or a sync failed for another reason. It is not retried: what was written is unknown."""


class JobDamaged(StorageError):
    """A job's files cannot be interpreted, or were replaced. The job is quarantined; others are served."""

    def __init__(self, job: str, what: str) -> None:
        super().__init__(
            f"job {job} is set apart, others are served: {what}; drop it (swift-ft inspect --drop-job {job}), "
            "or put its files right and start the server again"
        )
        self.job = job


def as_storage_error(error: OSError, job: str = "") -> StorageError:
    """Converts an OSError. ``job``: owner of the file concerned."""
    if not isinstance(error, Unsound):
        if error.errno in BUSY:
            return StorageBusy(
                f"cannot write now: {error.strerror}; raise what the process may have (ulimit -n)"
            )
        if error.errno in NO_SPACE:
            return StorageFull(f"no space left: {error.strerror}; free some, or trim the log")
        if job and error.errno in IN_THE_WAY:
            return JobDamaged(job, f"{error.filename}: {error.strerror}")
    return StorageFailed(f"a write failed: {error.strerror}; see to the disk, then start again")
