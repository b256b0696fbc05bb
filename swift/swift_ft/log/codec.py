"""Codecs: how a record's body is stored. Bit-exact, by name; `swift_ft.log.frame` assigns their numbers.

======================  ==============================================================================
``none``                uncompressed
``lz4``                 one lz4 block: gains on zeros (after ReLU), not on other floats
``bitshuffle``          the elements' bits transposed, then lz4: sign and exponent of floats compress
======================  ==============================================================================

A body that does not shrink is stored uncompressed. Both libraries release the GIL. ``bitshuffle`` is a blosc
(version 1) chunk, written and read by numcodecs. numcodecs is imported for the first record that needs it, so a log
server never imports it.

A chunk from the disk or a peer is untrusted, but blosc trusts it: it gets a pointer without a length, takes the
compressed length from the chunk, allocates the size in the chunk, and runs the compressor that the chunk names. So
`decompress` accepts only chunks that this program could have written::

     0    1    2    3     4            8            12           16
    +----+----+----+-----+------------+------------+------------+
    | 2  | 1  |flag|width| raw bytes  | block size |stored bytes|  then where each block starts (4 bytes each)
    +----+----+----+-----+------------+------------+------------+

Flags: bit shuffle and lz4, optionally "not split". Raw and stored bytes must equal the frame's, width the element
type's. The block size is a multiple of the width (otherwise blosc returns uninitialized memory) and at most 1 MiB.
Every block starts after the table and within the chunk. After these checks blosc compares every length in the chunk
with the chunk's end, and lz4 does not write beyond its given output size.
"""

import struct
from functools import cache
from types import ModuleType

import lz4.block

from swift_ft.errors import RecordCorrupt, ServiceError, UsageError

Bytes = bytes | bytearray | memoryview

NAMES = ("none", "lz4", "bitshuffle")
RATIO_MAX = 255
"""Largest compression ratio: that of lz4, which no codec here exceeds."""

_CHUNK = struct.Struct("<BBBBIII")
_FLAGS = (0x24, 0x34)  # bit shuffle | lz4, split or not
_BLOCK_BYTES = 128 << 10
_BLOCK_BYTES_MAX = 1 << 20
_LEVEL = 5
_SHRINKABLE_BYTES_MIN = 128


def compress(codec: str, body: memoryview, width: int) -> tuple[str, Bytes]:
    """Returns (codec used, stored body); codec "none" if the body does not shrink. ``width``: bytes of one number."""
    if codec == "none" or body.nbytes < _SHRINKABLE_BYTES_MIN:
        return "none", body
    packed: bytes
    if codec == "lz4":
        packed = lz4.block.compress(body, store_size=False)
    else:
        packed = _blosc().compress(body, b"lz4", _LEVEL, 2, _BLOCK_BYTES, width)
    return (codec, packed) if len(packed) < body.nbytes else ("none", body)


def decompress(codec: str, stored: memoryview, raw_bytes: int, width: int) -> memoryview:
    """Returns the raw body, ``raw_bytes`` long. Raises RecordCorrupt if it does not decompress to that length."""
    if codec == "none":
        return stored
    raw = _from_lz4(stored, raw_bytes) if codec == "lz4" else _from_chunk(stored, raw_bytes, width)
    if len(raw) != raw_bytes:
        raise RecordCorrupt(f"its {codec} body gives {len(raw)} bytes, not {raw_bytes}")
    return memoryview(raw)


def _from_lz4(stored: memoryview, raw_bytes: int) -> bytes:
    try:
        raw: bytes = lz4.block.decompress(stored, uncompressed_size=raw_bytes)
    except lz4.block.LZ4BlockError as error:
        raise RecordCorrupt(f"its lz4 block does not decompress: {error}") from None
    return raw


def _from_chunk(stored: memoryview, raw_bytes: int, width: int) -> bytes:
    check_chunk(stored, raw_bytes, width)
    try:
        raw: bytes = _blosc().decompress(stored)
    except RuntimeError as error:
        raise RecordCorrupt(f"its bitshuffle chunk does not decompress: {error}") from None
    return raw


def check_chunk(stored: memoryview, raw_bytes: int, width: int) -> None:
    """Raises RecordCorrupt unless these bytes are safe for blosc. Allocates no memory for the body."""
    if stored.nbytes < _CHUNK.size:
        raise RecordCorrupt(f"its bitshuffle chunk has {stored.nbytes} bytes, less than a header")
    version, lz4_version, flags, claimed_width, claimed_raw, block_bytes, claimed_stored = _CHUNK.unpack_from(
        stored
    )
    if (version, lz4_version) != (2, 1) or flags not in _FLAGS:
        raise RecordCorrupt(f"its chunk is not of bit shuffle and lz4 ({version}, {lz4_version}, {flags:#x})")
    if claimed_width != width:
        raise RecordCorrupt(f"its bitshuffle chunk says {claimed_width} bytes an element, not {width}")
    if claimed_raw != raw_bytes or claimed_stored != stored.nbytes:
        raise RecordCorrupt(
            f"its bitshuffle chunk says {claimed_raw} bytes in {claimed_stored}, not {raw_bytes} in {stored.nbytes}"
        )
    if not 0 < block_bytes <= min(raw_bytes, _BLOCK_BYTES_MAX) or block_bytes % width:
        raise RecordCorrupt(f"its bitshuffle chunk cannot have blocks of {block_bytes} bytes")
    blocks = -(-raw_bytes // block_bytes)
    table_end = _CHUNK.size + 4 * blocks
    if table_end > stored.nbytes:
        raise RecordCorrupt(f"its bitshuffle chunk ends before the table of its {blocks} blocks")
    starts = struct.unpack_from(f"<{blocks}I", stored, _CHUNK.size)
    if min(starts) < table_end or max(starts) > stored.nbytes - 4:
        raise RecordCorrupt("a block of its bitshuffle chunk lies outside of it")


def check_codec(codec: str) -> None:
    """Validates a writer's codec option. Raises UsageError if unknown, ServiceError if not installed."""
    if codec not in NAMES:
        raise UsageError(f"codec {codec!r} is not known; give one of {', '.join(NAMES)}")
    if codec == "bitshuffle":
        _blosc()  # imports numcodecs now, not while a record is being timed


@cache
def _blosc() -> ModuleType:
    try:
        from numcodecs import blosc
    except ImportError as error:
        raise ServiceError(
            f"codec bitshuffle needs numcodecs: pip install 'swift-ft[train]' ({error})"
        ) from None
    module: ModuleType = blosc
    return module
