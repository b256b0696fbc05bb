"""One segment file as the storage knows it: where its records are, and how it grows."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from services.logserver.disk import NO_SPACE, File
from swift.log.frame import Bytes
from swift.log.segment import BLOCK_BYTES, padding

_RESERVE_STEP = 32 << 20


class Unsound(OSError):
    """A write failed, and so did the way back from it: nobody knows what the file holds."""


@dataclass(slots=True, eq=False)
class Segment:
    path: Path
    first: int
    size: int
    """Where its frames end."""
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))  # 0: damaged
    file: File | None = None  # if it is the last one and not sealed
    tail: bytes = b""
    """Of the last block, what the frames fill: the next write begins with it."""
    reserved: int = 0

    @property
    def next_sequence(self) -> int:
        return self.first + len(self.offsets)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def offsets_of(self, sizes: Iterable[int]) -> list[int]:
        """Where frames of these sizes will be."""
        ends = accumulate(sizes, initial=self.size)
        return list(ends)[:-1]

    def write(self, parts: Sequence[Bytes]) -> None:
        """Appends bytes. If it raises, the segment is as it was, unless it raises Unsound."""
        assert self.file is not None
        begin = self.size - len(self.tail)
        end = self.size + sum(map(len, parts))
        if end + BLOCK_BYTES > self.reserved:
            self._reserve(end + BLOCK_BYTES)
        try:
            self.file.write(begin, [self.tail, *parts, padding(end)])
        except OSError as error:
            self._cut(self.size, error)
            raise
        self.tail = _last_bytes([self.tail, *parts], end % BLOCK_BYTES)
        self.size = end

    def _reserve(self, size: int) -> None:
        assert self.file is not None
        ample = max(size, self.reserved + _RESERVE_STEP)
        try:
            self.file.reserve(ample)
            self.reserved = ample
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._cut(self.size, error)  # gives back a part that was taken
            self.file.reserve(size)
            self.reserved = size

    def go_back(self, size: int, tail: bytes) -> None:
        """To before writes that shall not count. Raises Unsound."""
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


def _last_bytes(parts: Sequence[Bytes], size: int) -> bytes:
    found = b""
    for part in reversed(parts):
        if len(found) == size:
            break
        found = bytes(memoryview(part)[max(0, len(part) - (size - len(found))) :]) + found
    return found
