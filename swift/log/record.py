"""A record: one tensor of one stream, as bytes. No torch, no numpy: the runtime turns them into tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import xxhash

from swift.errors import UsageError
from swift.names import NAME_PATTERN, check_name

__all__ = ["NAME_PATTERN", "check_name"]  # names are part of what identifies a record

DIGEST_BYTES = 16
DIMS_MAX = 8
STEP_MAX = (1 << 62) - 1
"""No run reaches it. A larger one is no step, and sums with it stay within 64 bits."""


@dataclass(frozen=True, slots=True)
class DType:
    """How an element type is called, numbered in a frame, and how many bytes an element takes."""

    name: str
    code: int
    bytes: int

    @property
    def width(self) -> int:
        """Bytes of a number: a complex element is two."""
        return self.bytes // 2 if self.name.startswith("complex") else self.bytes


# A code is never used twice and never changes its meaning.
_DTYPES = (
    DType("bool", 1, 1),
    DType("uint8", 2, 1),
    DType("int8", 3, 1),
    DType("int16", 4, 2),
    DType("int32", 5, 4),
    DType("int64", 6, 8),
    DType("float16", 7, 2),
    DType("bfloat16", 8, 2),
    DType("float32", 9, 4),
    DType("float64", 10, 8),
    DType("complex64", 11, 8),
    DType("complex128", 12, 16),
    DType("float8_e4m3fn", 13, 1),
    DType("float8_e5m2", 14, 1),
    DType("float8_e4m3fnuz", 15, 1),
    DType("float8_e5m2fnuz", 16, 1),
    DType("float8_e8m0fnu", 17, 1),
    DType("uint16", 18, 2),
    DType("uint32", 19, 4),
    DType("uint64", 20, 8),
    DType("complex32", 21, 4),
)
DTYPE_BY_NAME: Mapping[str, DType] = MappingProxyType({dtype.name: dtype for dtype in _DTYPES})
DTYPE_BY_CODE: Mapping[int, DType] = MappingProxyType({dtype.code: dtype for dtype in _DTYPES})


@dataclass(frozen=True, slots=True, order=True)
class RecordKey:
    """Where a tensor belongs within its stream."""

    step: int
    microbatch: int
    slot: int

    def __str__(self) -> str:
        return f"step {self.step} microbatch {self.microbatch} slot {self.slot}"


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor read back from the log, its checksums verified."""

    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    body: memoryview
    digest: bytes
    generation: int
    sequence: int


def stream_tag(job: str, stream: str) -> int:
    """The 64-bit identity of a stream that each of its frames carries."""
    return xxhash.xxh3_64_intdigest(f"{job}/{stream}".encode())


def as_bytes(body: "memoryview | bytes | bytearray") -> memoryview:
    """The same memory as a flat view of bytes. Raises UsageError if it is not contiguous."""
    view = memoryview(body)
    if view.nbytes == 0:
        return memoryview(b"")
    if view.ndim == 1 and view.format == "B" and view.contiguous:
        return view
    try:
        return view.cast("B")
    except TypeError as error:
        raise UsageError("the body of a record must be contiguous memory") from error


def digest_of(dtype: str, shape: tuple[int, ...], body: "memoryview | bytes | bytearray") -> bytes:
    """16 bytes that tell a tensor from any other one: element type, shape and raw bytes."""
    state = xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())
    state.update(as_bytes(body))
    return state.digest()
