"""Segment files: ``<job>/<stream>/<first sequence, 20 digits>.seg``, and stubs of those that were moved to an object
store. Written by the log server, read by all.

::

    0                                                     256
    +------+-----+-----+-----+------+-----+---------+-----+------------+-----+--------+-------+ ... +------+--------+
    | SWSG | ver | len | crc | zero | tag | first # | uid | generation | job | stream | frame | ... | zero | footer |
    +------+-----+-----+-----+------+-----+---------+-----+------------+-----+--------+-------+ ... +------+--------+

    header, 256 bytes          footer, 64 bytes, once the segment is sealed; the file ends with it
      0  4  magic SWSG           0  4  magic SWFT
      4  2  version 2            4  2  version 1
      6  2  length 256           6  2  length 64
      8  4  crc32c of 12..256    8  4  crc32c of 12..64
     12  4  zero                12  4  zero
     16  8  stream tag          16  8  stream tag
     24  8  first sequence      24  8  first sequence
     32 16  the job's uid       32  8  number of records
     48  8  generation          40  8  where the frames end
     56  8  zero                48 16  zero
     64 64  job, zero-padded
    128 64  stream
    192 64  zero

The uid is the one in the job's manifest, so a file of an earlier job of the same name is detected. The generation is
the one in which the file was created.

Files are written in blocks of 4096 bytes. A partial last block is padded with zeros, which the next frames overwrite,
or which precede the footer.

Sequences are contiguous, within a segment and from one segment to the next. A segment is sealed before its successor
is created, so only the last one can have a torn tail. How a file ends:

=================================================== ============== =============================
what is there                                       last, unsealed sealed, or not the last
=================================================== ============== =============================
no bytes, or zeros that fill a block                clean          sealed: the footer says where
fewer bytes than a header, or than the frame needs  torn tail      damage
only zeros, more than fill a block                  torn tail      damage
a complete but wrong header, followed by bytes      damage         damage
a complete frame with a wrong body                  damage         damage
another stream's frame, or an unexpected sequence   damage         damage
=================================================== ============== =============================

A torn tail was never acknowledged and is cut off. Damage is not cut off: records after it are still found (by magic and
checksums), but the damaged records are refused until their writer sends them again.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import crc32c

from swift_ft.errors import RecordCorrupt, RecordInvalid
from swift_ft.files import open_regular
from swift_ft.log.frame import (
    FIXED_BYTES,
    HEADER_BYTES_MAX,
    MAGIC,
    Bytes,
    FrameHeader,
    FrameIncomplete,
    check_body,
    decode_header,
)
from swift_ft.log.manifest import NO_UID, ManifestDamaged
from swift_ft.log.record import stream_tag

SEGMENT_MAGIC = b"SWSG"
FOOTER_MAGIC = b"SWFT"
HEADER_VERSION = 2
FOOTER_VERSION = 1
BLOCK_BYTES = 4096
"""Unit of file writes. No disk in use has larger sectors."""
SEGMENT_HEADER_BYTES = 256
FOOTER_BYTES = 64
SUFFIX = ".seg"

_HEADER = struct.Struct("<4sHHIIQQ16sQ8s64s64s64s")
_FOOTER = struct.Struct("<4sHHIIQQQQ16s")
_CRC_FROM = 12
_CHUNK_BYTES = 1 << 20
_ANY_BODY_BYTES = 1 << 62  # while scanning, a body is bounded by the file it is in

assert _HEADER.size == SEGMENT_HEADER_BYTES
assert _FOOTER.size == FOOTER_BYTES


class Ending(StrEnum):
    CLEAN = "clean"
    SEALED = "sealed"
    TORN = "torn"


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    job: str
    stream: str
    first_sequence: int
    uid: str = NO_UID
    generation: int = 0

    @property
    def tag(self) -> int:
        return stream_tag(self.job, self.stream)


SEQUENCE_MAX = 1 << 62
"""Largest sequence that a segment file may be named after."""
FILE_BYTES_LEAST = 16 << 30
"""Lower bound of the size limit for segment files. A larger file need not come from a log server, which seals a segment
after the record that fills it."""


@dataclass(frozen=True, slots=True)
class Owner:
    job: str
    stream: str
    uid: str


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    offset: int
    header: FrameHeader
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of records lost to disk damage."""

    sequence: int
    end_sequence: int | None
    """Exclusive end. None: all records, if any, from ``sequence`` to the end of the file."""
    reason: str


@dataclass(slots=True)
class SegmentScan:
    """Contents of a segment file. ``end`` is the offset after the last record, where an append goes."""

    path: Path
    size: int
    header: SegmentHeader | None = None
    records: list[ScannedRecord] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    ending: Ending = Ending.CLEAN
    end: int = 0

    @property
    def torn_bytes(self) -> int:
        return self.size - self.end if self.ending is Ending.TORN else 0


def segment_name(first_sequence: int) -> str:
    return f"{first_sequence:020d}{SUFFIX}"


def _seal(packed: bytes) -> bytes:
    """Returns the bytes with the checksum of everything from offset 12 on at offset 8."""
    return packed[:8] + struct.pack("<I", crc32c.crc32c(packed[_CRC_FROM:])) + packed[_CRC_FROM:]


def encode_segment_header(header: SegmentHeader) -> bytes:
    packed = _HEADER.pack(
        SEGMENT_MAGIC,
        HEADER_VERSION,
        SEGMENT_HEADER_BYTES,
        0,
        0,
        header.tag,
        header.first_sequence,
        bytes.fromhex(header.uid),
        header.generation,
        b"",
        header.job.encode(),
        header.stream.encode(),
        b"",
    )
    return _seal(packed)


def decode_segment_header(data: bytes) -> SegmentHeader:
    """Decodes and validates a segment header. Raises RecordCorrupt or RecordInvalid."""
    magic, version, length, crc, _, tag, first, uid, generation, _, job, stream, _ = _HEADER.unpack(data)
    if magic != SEGMENT_MAGIC:
        raise RecordCorrupt("the segment header's magic is wrong")
    if version != HEADER_VERSION or length != SEGMENT_HEADER_BYTES:
        raise RecordInvalid(
            f"segment version {version} is not known; this program reads version {HEADER_VERSION}"
        )
    if crc32c.crc32c(data[_CRC_FROM:]) != crc:
        raise RecordCorrupt("the segment header's checksum does not match")
    try:
        names = job.rstrip(b"\0").decode(), stream.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise RecordCorrupt("the segment header's names are none") from None
    header = SegmentHeader(*names, first, uid.hex(), generation)
    if header.tag != tag:
        raise RecordCorrupt("the segment header's stream tag is not that of its names")
    return header


def encode_footer(header: SegmentHeader, records: int, end: int) -> bytes:
    """Returns the footer's 64 bytes, for frames that end at ``end``."""
    packed = _FOOTER.pack(
        FOOTER_MAGIC, FOOTER_VERSION, FOOTER_BYTES, 0, 0, header.tag, header.first_sequence, records, end, b""
    )
    return _seal(packed)


def padding(end: int, more: int = 0) -> bytes:
    """Returns zeros to write at ``end``, so that ``more`` bytes after them end at a block boundary."""
    return bytes(-(end + more) % BLOCK_BYTES)


def _decode_footer(data: bytes, header: SegmentHeader, offset: int) -> tuple[int, int] | None:
    """Returns (records, end of the frames) from the footer at ``offset``; None if it is not this segment's footer."""
    if len(data) != FOOTER_BYTES:
        return None
    magic, version, length, crc, _, tag, first, records, at, _ = _FOOTER.unpack(data)
    if magic != FOOTER_MAGIC or version != FOOTER_VERSION or length != FOOTER_BYTES:
        return None
    if crc32c.crc32c(data[_CRC_FROM:]) != crc:
        return None
    if (tag, first) != (header.tag, header.first_sequence) or not 0 <= offset - at < BLOCK_BYTES:
        return None
    return int(records), int(at)


class Source(Protocol):
    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Returns `size` bytes, or fewer at the end of the file."""


class _Opened:
    def __init__(self, path: Path) -> None:
        self._fd = open_regular(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def close(self) -> None:
        os.close(self._fd)


def scan(path: Path) -> SegmentScan:
    """Returns the contents of a segment file. Raises RecordCorrupt, naming the position, if it has damage."""
    result = walk(path)
    if result.damage:
        raise RecordCorrupt(f"{path}: {result.damage[0].reason}")
    return result


def walk(
    path: Path,
    *,
    verify_bodies: bool = True,
    last: bool = True,
    source: Source | None = None,
    owner: Owner | None = None,
) -> SegmentScan:
    """Returns the contents of a segment file, damage included. ``last``: no segment of the stream follows it.
    ``owner``: the job and stream that it must belong to.

    With ``verify_bodies`` False, bodies of a sealed segment are not checked until they are read; those of an unsealed
    one are always checked. ``source``: the file's contents, for a caller that must not open ``path``.
    """
    if source is not None:
        return _Walker(path, source, verify_bodies, last, owner).walk()
    opened = _Opened(path)
    try:
        return _Walker(path, opened, verify_bodies, last, owner).walk()
    finally:
        opened.close()


class _Walker:
    def __init__(
        self, path: Path, source: Source, verify_bodies: bool, last: bool, owner: Owner | None
    ) -> None:
        self.source = source
        self.owner = owner
        self.verify = verify_bodies
        self.last = last
        self.result = SegmentScan(path, source.size)
        self.data_end = self.result.size
        self.expected = 0
        self._sequence_max = 0
        """Largest sequence that fits into the file. Limits the sequences accepted after damage."""

    def walk(self) -> SegmentScan:
        result = self.result
        header = self._header()
        if header is None:
            return result
        result.header = header
        result.end = SEGMENT_HEADER_BYTES
        self.expected = header.first_sequence
        self._sequence_max = header.first_sequence + result.size // FIXED_BYTES
        sealed = None
        footer_at = result.size - FOOTER_BYTES
        if footer_at >= SEGMENT_HEADER_BYTES:
            sealed = _decode_footer(self.source.read(footer_at, FOOTER_BYTES), header, footer_at)
        if sealed is None:
            self.verify = True
        else:
            result.ending = Ending.SEALED
            self.data_end = sealed[1]
            self.last = False
        self._frames(header)
        if sealed is not None and self.expected != header.first_sequence + sealed[0]:
            end = header.first_sequence + sealed[0]
            self._damage(end, f"its footer says that it has {sealed[0]} records")
        return result

    def _damage(self, end_sequence: int | None, reason: str) -> None:
        where = f"record {self.expected} at offset {self.result.end}: {reason}"
        self.result.damage.append(Damage(self.expected, end_sequence, where))

    def _header(self) -> SegmentHeader | None:
        result = self.result
        data = self.source.read(0, SEGMENT_HEADER_BYTES)
        named = int(result.path.name.removesuffix(SUFFIX))
        self.expected = named
        if self.last and (len(data) < SEGMENT_HEADER_BYTES or not any(data)):
            # The server was killed before the first record could be acknowledged.
            result.ending = Ending.TORN
            return None
        try:
            if len(data) < SEGMENT_HEADER_BYTES:
                raise RecordCorrupt("the segment is shorter than its header")
            header = decode_segment_header(data)
            if header.first_sequence != named:
                raise RecordCorrupt(f"the segment says that it starts with record {header.first_sequence}")
            if self.owner is not None:
                self._check_owner(header, self.owner)
        except (RecordCorrupt, RecordInvalid) as error:
            self._damage(None, str(error))
            return None
        return header

    @staticmethod
    def _check_owner(header: SegmentHeader, owner: Owner) -> None:
        if (header.job, header.stream) != (owner.job, owner.stream):
            raise RecordCorrupt(f"the segment is one of stream {header.stream} of job {header.job}")
        if header.uid != owner.uid:
            raise RecordCorrupt("the segment is one of another job that had this name")

    def _frames(self, segment: SegmentHeader) -> None:
        result = self.result
        while result.end < self.data_end:
            try:
                frame = self._frame_at(result.end, segment.tag)
                if frame.sequence != self.expected:
                    raise RecordCorrupt(f"record {frame.sequence} is where {self.expected} should be")
            except FrameIncomplete as error:
                if self._is_padding(result.end):
                    return
                if self.last:
                    result.ending = Ending.TORN
                else:
                    self._damage(None, f"cut short: {error}")
                return
            except (RecordCorrupt, RecordInvalid) as error:
                if self._is_padding(result.end):
                    return
                if self.last and self._zeros_from(result.end):
                    result.ending = Ending.TORN
                    return
                if not self._resynchronize(segment.tag, str(error)):
                    return
                continue
            self._body(frame)

    def _frame_at(self, offset: int, tag: int) -> FrameHeader:
        length = min(HEADER_BYTES_MAX, self.data_end - offset)
        frame = decode_header(self.source.read(offset, length), 0, _ANY_BODY_BYTES)
        if frame.stream_tag != tag:
            raise RecordCorrupt("a frame of another stream")
        if offset + frame.frame_bytes > self.data_end:
            raise FrameIncomplete(
                f"the frame needs {frame.frame_bytes} bytes, there are {self.data_end - offset}"
            )
        return frame

    def _body(self, frame: FrameHeader) -> None:
        result = self.result
        damaged = False
        if self.verify:
            body = self.source.read(result.end + frame.header_bytes, frame.stored_bytes)
            try:
                check_body(frame, memoryview(body))
            except RecordCorrupt as error:
                damaged = True
                self._damage(self.expected + 1, str(error))
        result.records.append(ScannedRecord(result.end, frame, damaged))
        result.end += frame.frame_bytes
        self.expected += 1

    def _is_padding(self, offset: int) -> bool:
        return self.data_end - offset == len(padding(offset)) and self._zeros_from(offset)

    def _zeros_from(self, offset: int) -> bool:
        while offset < self.data_end:
            chunk = self.source.read(offset, min(_CHUNK_BYTES, self.data_end - offset))
            if any(chunk):
                return False
            offset += len(chunk)
        return True

    def _resynchronize(self, tag: int, reason: str) -> bool:
        """Finds the next frame of this stream after damage. Returns False if there is none."""
        for at in self._magic_from(self.result.end + 1):
            try:
                frame = self._frame_at(at, tag)
            except (RecordCorrupt, RecordInvalid, FrameIncomplete):
                continue
            if self.expected < frame.sequence <= self._sequence_max:
                self._damage(frame.sequence, reason)
                self.result.end, self.expected = at, frame.sequence
                return True
        self._damage(None, reason)
        return False

    def _magic_from(self, offset: int) -> Iterator[int]:
        """Yields offsets, from `offset` on, where the magic of a frame stands."""
        while offset < self.data_end:
            chunk = self.source.read(offset, min(_CHUNK_BYTES, self.data_end - offset))
            at = chunk.find(MAGIC)
            while at >= 0:
                yield offset + at
                at = chunk.find(MAGIC, at + 1)
            if offset + len(chunk) >= self.data_end:
                return
            offset += len(chunk) - len(MAGIC) + 1


# Stub of a segment that was moved to an object store: its header, its frames' headers, its footer (docs/format.md).

COLD_SUFFIX = ".cold"
URL_BYTES_MAX = 4096
"""Size of `DIRECTORY/.cold`, which has the URL of the store."""
STUB_BYTES_MAX = 1 << 30

# A stub, little endian: magic, version, crc32c of all that follows; the segment's bytes, the number of pieces; of each
# piece its offset in the segment and its length; the pieces' bytes, one after another.
_STUB_MAGIC, _STUB_VERSION = b"SWCD", 1
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
            if (magic, version) != (_STUB_MAGIC, _STUB_VERSION) or at > len(data):
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
        return _HEAD.pack(_STUB_MAGIC, _STUB_VERSION, crc32c.crc32c(body)) + body

    def read(self, offset: int, size: int) -> bytes:
        """Returns what is known from this offset on, at most `size` bytes."""
        at = bisect_right(self._offsets, offset) - 1
        return self._pieces[at][offset - self._offsets[at] :][:size] if at >= 0 else b""

    def close(self) -> None:
        pass


def stub_path(segment: Path) -> Path:
    return segment.with_suffix(COLD_SUFFIX)
