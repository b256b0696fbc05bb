"""Stub of a segment that was moved to an object store (docs/format.md): its header, its frames' headers, its footer."""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import crc32c

from swift_ft.log.frame import Bytes
from swift_ft.log.manifest import ManifestDamaged
from swift_ft.log.segment import FOOTER_BYTES, SEGMENT_HEADER_BYTES, SegmentScan, Source

COLD_SUFFIX = ".cold"
URL_BYTES_MAX = 4096
"""Size of `DIRECTORY/.cold`, which has the URL of the store."""
STUB_BYTES_MAX = 1 << 30

# A stub, little endian: magic, version, crc32c of all that follows; the segment's bytes, the number of pieces; of each
# piece its offset in the segment and its length; the pieces' bytes, one after another.
_MAGIC, _VERSION = b"SWCD", 1
_HEAD = struct.Struct("<4sII")
_FACTS = struct.Struct("<QQ")
_PIECE = struct.Struct("<QI")


class Stub:
    """A segment of which only some pieces are known, as a file that is read to recover it."""

    def __init__(self, size: int, pieces: Sequence[tuple[int, Bytes]]) -> None:
        self.size = size
        self._offsets = [offset for offset, _ in pieces]
        self._pieces = [bytes(piece) for _, piece in pieces]

    @classmethod
    def of(cls, scanned: SegmentScan, source: Source) -> "Stub":
        """Makes the stub of a sealed segment without damage."""
        footer_at = scanned.size - FOOTER_BYTES
        places = [(0, SEGMENT_HEADER_BYTES)]
        places += [(record.offset, record.header.header_bytes) for record in scanned.records]
        places.append((footer_at, FOOTER_BYTES))
        return cls(scanned.size, [(offset, source.read(offset, length)) for offset, length in places])

    @classmethod
    def decode(cls, data: bytes) -> "Stub":
        """Raises ManifestDamaged."""
        try:
            magic, version, crc = _HEAD.unpack_from(data)
            size, count = _FACTS.unpack_from(data, _HEAD.size)
            table = _HEAD.size + _FACTS.size
            at = table + count * _PIECE.size
            if (magic, version) != (_MAGIC, _VERSION) or at > len(data):
                raise ManifestDamaged("it does not begin as it should")
            if crc32c.crc32c(data[_HEAD.size :]) != crc:
                raise ManifestDamaged("its checksum does not match")
        except struct.error:
            raise ManifestDamaged("it is cut short") from None
        pieces = []
        for offset, length in _PIECE.iter_unpack(data[table:at]):
            pieces.append((offset, data[at : at + length]))
            at += length
        return cls(size, pieces)

    def encode(self) -> bytes:
        body = bytearray(_FACTS.pack(self.size, len(self._pieces)))
        for offset, piece in zip(self._offsets, self._pieces, strict=True):
            body += _PIECE.pack(offset, len(piece))
        for piece in self._pieces:
            body += piece
        return _HEAD.pack(_MAGIC, _VERSION, crc32c.crc32c(body)) + body

    def read(self, offset: int, size: int) -> bytes:
        """Returns what is known from this offset on, at most `size` bytes."""
        at = bisect_right(self._offsets, offset) - 1
        return self._pieces[at][offset - self._offsets[at] :][:size] if at >= 0 else b""

    def close(self) -> None:
        pass


def stub_path(segment: Path) -> Path:
    return segment.with_suffix(COLD_SUFFIX)
