"""A frame: one record as it is on the wire and on disk. Little-endian.

::

     0       4     6     8          12         16                     24
    +-------+-----+-----+----------+----------+----------------------+
    | SWFR  | ver | len | head crc | body crc |      stream tag      |
    +-------+-----+-----+----------+----------+----------------------+ 24
    |      sequence     |     generation      |         step         |
    +---------+---------+---------------------+----------------------+ 48
    |microbat.|  slot   |      raw bytes      |     stored bytes     |
    +-----+-----+----+--+---------------------+----------------------+ 72
    |codec|dtype|ndim|flags| zero (4) |      digest of the raw tensor
    +-----+-----+----+-----+----------+------------------------------+ 96
      ... digest ends at 96 |            zero (32)                   | 128
    +--------------------------------------------------------------- +
    | ndim dimensions of 8 bytes                                     | 128 + 8 ndim
    +----------------------------------------------------------------+
    | stored bytes of the body                                       |
    +----------------------------------------------------------------+

``ver`` is 1. ``len`` is the length of the header: 128 + 8 ndim. ``head crc`` is crc32c of the header's bytes
from offset 12 on, dimensions included. So it covers everything except magic, version, length and itself; the first
three are compared with their required values. ``body crc`` is crc32c of the stored body. The digest is
`swift_ft.log.record.digest_of` the raw tensor, so a regenerated tensor is compared without reading a body.

Checks are made in this order, before any allocation: magic, version, number of dimensions and header length;
header checksum; codec, element type, reserved bytes; the key, and the constraints of a mark; sizes against their
bounds and against dtype x shape; then the body's checksum. A field never changes its meaning. A reserved byte that is
not zero is refused, so that it can get a meaning later.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import crc32c

from swift_ft.errors import LogError, RecordCorrupt, RecordInvalid
from swift_ft.log import codec
from swift_ft.log.record import (
    DIMS_MAX,
    DTYPE_BY_CODE,
    DTYPE_BY_NAME,
    MARK_DTYPE,
    MARK_SHAPE,
    MARK_SLOT,
    STEP_MAX,
    Record,
    RecordKey,
    digest_of,
)

Bytes = codec.Bytes

MAGIC = b"SWFR"
VERSION = 1
FIXED_BYTES = 128
HEADER_BYTES_MAX = FIXED_BYTES + 8 * DIMS_MAX
BODY_BYTES_MAX = 256 << 20
"""Default limit of a stored or raw body, for servers and readers."""

# Numbers on the wire and on disk. A number is never used twice and never changes its meaning.
CODEC_NONE = 0
CODEC_LZ4 = 1
CODEC_BITSHUFFLE = 2
CODECS = {"none": CODEC_NONE, "lz4": CODEC_LZ4, "bitshuffle": CODEC_BITSHUFFLE}
_CODEC_NAMES = {number: name for name, number in CODECS.items()}

_FIXED = struct.Struct("<4sHHIIQQQQIIQQBBBBI16s32s")
_AFTER_CRC = struct.Struct("<IQQQQIIQQBBBBI16s32s")
_CRC_FROM = 12
_ZERO_32 = bytes(32)
_SIGNED_64_MAX = (1 << 63) - 1
_MARK_DIGEST = digest_of(MARK_DTYPE, MARK_SHAPE, b"")

assert _FIXED.size == FIXED_BYTES
assert _AFTER_CRC.size == FIXED_BYTES - _CRC_FROM


class FrameIncomplete(LogError):
    """Error for bytes that end before the frame does. At the end of a file this is a torn tail, not corruption."""


class FrameOversize(RecordInvalid):
    """Error for a body over the configured limit."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    stream_tag: int
    sequence: int
    generation: int
    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    codec: int
    raw_bytes: int
    stored_bytes: int
    body_crc: int
    digest: bytes

    @property
    def header_bytes(self) -> int:
        return FIXED_BYTES + 8 * len(self.shape)

    @property
    def frame_bytes(self) -> int:
        return FIXED_BYTES + 8 * len(self.shape) + self.stored_bytes


def raw_bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a tensor. The product cannot overflow, because Python's integers do not."""
    size = DTYPE_BY_NAME[dtype].bytes
    for dimension in shape:
        size *= dimension
    return size


def decompress(header: FrameHeader, stored: memoryview) -> memoryview:
    """Returns the raw body. Its size is bounded by the header's raw length, which was checked against the shape. Raises
    RecordCorrupt if the bytes do not decompress to it."""
    width = DTYPE_BY_NAME[header.dtype].width
    try:
        return codec.decompress(_CODEC_NAMES[header.codec], stored, header.raw_bytes, width)
    except RecordCorrupt as error:
        raise RecordCorrupt(f"{header.key}: {error}") from None


def encode_header(header: FrameHeader) -> bytes:
    """Returns the frame's header with dimensions and checksum: 128 + 8 ndim bytes."""
    dims = struct.pack(f"<{len(header.shape)}Q", *header.shape)
    key = header.key
    tail = (
        _AFTER_CRC.pack(
            header.body_crc,
            header.stream_tag,
            header.sequence,
            header.generation,
            key.step,
            key.microbatch,
            key.slot,
            header.raw_bytes,
            header.stored_bytes,
            header.codec,
            DTYPE_BY_NAME[header.dtype].code,
            len(header.shape),
            0,
            0,
            header.digest,
            _ZERO_32,
        )
        + dims
    )
    front = struct.pack("<4sHHI", MAGIC, VERSION, FIXED_BYTES + len(dims), crc32c.crc32c(tail))
    return front + tail


def decode_header(buffer: Bytes, offset: int = 0, body_bytes_max: int = BODY_BYTES_MAX) -> FrameHeader:
    """Returns the header that starts at ``offset``. Raises FrameIncomplete, RecordCorrupt or RecordInvalid."""
    available = len(buffer) - offset
    if available < FIXED_BYTES:
        raise FrameIncomplete(f"a frame's header needs {FIXED_BYTES} bytes, there are {available}")
    (
        magic,
        version,
        header_bytes,
        header_crc,
        body_crc,
        tag,
        sequence,
        generation,
        step,
        microbatch,
        slot,
        raw_bytes,
        stored_bytes,
        codec_number,
        dtype_code,
        ndim,
        flags,
        zero,
        digest,
        zeros,
    ) = _FIXED.unpack_from(buffer, offset)
    if magic != MAGIC:
        raise RecordCorrupt("no frame starts here: the magic is wrong")
    if version != VERSION:
        raise RecordInvalid(f"frame version {version} is not known; this program reads version {VERSION}")
    if ndim > DIMS_MAX or header_bytes != FIXED_BYTES + 8 * ndim:
        raise RecordCorrupt(f"a frame with {ndim} dimensions cannot have a header of {header_bytes} bytes")
    if available < header_bytes:
        raise FrameIncomplete(f"a frame's header needs {header_bytes} bytes, there are {available}")
    view = memoryview(buffer)
    if crc32c.crc32c(view[offset + _CRC_FROM : offset + header_bytes]) != header_crc:
        raise RecordCorrupt("a frame's header checksum does not match")
    dtype = DTYPE_BY_CODE.get(dtype_code)
    if dtype is None:
        raise RecordInvalid(f"element type {dtype_code} is not known")
    if codec_number not in _CODEC_NAMES:
        raise RecordInvalid(f"codec {codec_number} is not known")
    if flags or zero or zeros != _ZERO_32:
        raise RecordInvalid("reserved bytes of the frame are set: a newer program wrote it")
    header = FrameHeader(
        stream_tag=tag,
        sequence=sequence,
        generation=generation,
        key=RecordKey(step, microbatch, slot),
        dtype=dtype.name,
        shape=struct.unpack_from(f"<{ndim}Q", buffer, offset + FIXED_BYTES),
        codec=codec_number,
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
        body_crc=body_crc,
        digest=digest,
    )
    check_key(header)
    check_sizes(header, body_bytes_max)
    return header


def check_key(header: FrameHeader) -> None:
    """Raises RecordInvalid for a step above `STEP_MAX`, or for an invalid mark. All later code, for the wire and for
    disks, relies on this check of the key."""
    key = header.key
    if not 0 <= key.step <= STEP_MAX:
        raise RecordInvalid(f"{key}: steps are at most {STEP_MAX}")
    if key.slot != MARK_SLOT:
        return
    if key.microbatch > key.step:
        raise RecordInvalid(f"{key}: a mark of {key.microbatch + 1} steps that ends with step {key.step}")
    if (header.dtype, header.shape, header.codec) != (MARK_DTYPE, MARK_SHAPE, CODEC_NONE):
        raise RecordInvalid(f"{key}: a mark holds no tensor, this is {header.dtype} {list(header.shape)}")
    if header.digest != _MARK_DIGEST:
        raise RecordInvalid(f"{key}: a mark's digest is that of no bytes")


def check_sizes(header: FrameHeader, body_bytes_max: int) -> None:
    """Raises RecordInvalid if the sizes contradict each other, FrameOversize if they are over the bound."""
    if len(header.shape) > DIMS_MAX or any(dim < 0 or dim > _SIGNED_64_MAX for dim in header.shape):
        raise RecordInvalid(f"{header.key}: shape {header.shape} is not allowed")
    raw_bytes = raw_bytes_of(header.dtype, header.shape)
    if raw_bytes != header.raw_bytes:
        raise RecordInvalid(
            f"{header.key}: {header.dtype} {list(header.shape)} takes {raw_bytes} bytes, "
            f"not {header.raw_bytes}"
        )
    if max(header.raw_bytes, header.stored_bytes) > body_bytes_max:
        raise FrameOversize(f"{header.key}: {header.raw_bytes} bytes are over the limit of {body_bytes_max}")
    if header.codec == CODEC_NONE and header.stored_bytes != header.raw_bytes:
        raise RecordInvalid(f"{header.key}: stored as it is, but {header.stored_bytes} bytes")
    if header.raw_bytes > codec.RATIO_MAX * header.stored_bytes:
        raise RecordInvalid(f"{header.key}: {header.stored_bytes} bytes cannot hold {header.raw_bytes}")


def check_body(header: FrameHeader, stored: memoryview) -> None:
    if crc32c.crc32c(stored) != header.body_crc:
        raise RecordCorrupt(f"{header.key}: its body's checksum does not match")


def decode_record(header: FrameHeader, stored: memoryview) -> Record:
    """Returns the record, verified down to the digest of the raw tensor."""
    check_body(header, stored)
    return decode_body(header, stored)


def decode_body(header: FrameHeader, stored: memoryview) -> Record:
    """As `decode_record`, for a stored body whose checksum is already verified."""
    body = decompress(header, stored)
    if digest_of(header.dtype, header.shape, body) != header.digest:
        raise RecordCorrupt(f"{header.key}: the digest of its tensor does not match")
    return Record(
        header.key, header.dtype, header.shape, body, header.digest, header.generation, header.sequence
    )


# Frames from messages. A message holds frames one after the other, and may end within a body. Then the next message
# of the call begins with the rest of that body. So a large record is sent in messages of a few megabytes.

MESSAGE_BYTES = 2 << 20
"""Largest message that a writer sends, except for a header; a reader gets up to two of them in one. gRPC is fastest
with 2 to 4 MiB."""


@dataclass(slots=True)
class _Begun:
    header: FrameHeader
    parts: list[memoryview]
    missing: int
    crc: int


class Assembler:
    def __init__(self, body_bytes_max: int) -> None:
        self.body_bytes_max = body_bytes_max
        self._begun: _Begun | None = None

    def feed(self, frames: memoryview) -> Iterator[tuple[FrameHeader, list[memoryview]]]:
        """Yields each complete frame: its header, and its bytes (header included) in one or more pieces that share
        memory with the messages. Raises FrameIncomplete, RecordInvalid, FrameOversize, RecordCorrupt."""
        while frames:
            if self._begun is None:
                header = decode_header(frames, 0, self.body_bytes_max)
                self._begun = _Begun(header, [], header.frame_bytes, 0)
                body_at = header.header_bytes
            else:
                body_at = 0
            begun = self._begun
            part, frames = frames[: begun.missing], frames[begun.missing :]
            begun.parts.append(part)
            begun.missing -= len(part)
            begun.crc = crc32c.crc32c(part[body_at:], begun.crc)
            if begun.missing == 0:
                self._begun = None
                if begun.crc != begun.header.body_crc:
                    raise RecordCorrupt(f"{begun.header.key}: its body's checksum does not match")
                yield begun.header, begun.parts

    def finish(self) -> None:
        """Ends the call. Raises RecordInvalid if a frame is incomplete."""
        if self._begun is not None:
            raise RecordInvalid(
                f"{self._begun.header.key}: {self._begun.missing} bytes of its frame never came"
            )


def cut(body: Bytes) -> list[Bytes]:
    """Splits a body into pieces of about equal size, none over MESSAGE_BYTES."""
    count = -(-len(body) // MESSAGE_BYTES)
    if count <= 1:
        return [body]
    each = -(-len(body) // count)
    view = memoryview(body)
    return [view[at : at + each] for at in range(0, len(view), each)]
