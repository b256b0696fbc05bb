"""Codecs: every body comes back bit for bit, and no stored body of whatever origin does harm."""

import random
import struct
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import RecordCorrupt
from swift_ft.log import codec as codecs
from swift_ft.log.record import DTYPE_BY_NAME

COMPRESSING = [name for name in codecs.NAMES if name != "none"]
SPECIAL = [
    *(struct.pack("<d", value) for value in (float("nan"), float("inf"), float("-inf"), -0.0, 5e-324)),
    bytes.fromhex("010000000000f07f"),  # a signalling NaN with a payload
    bytes.fromhex("0100807f0100c0ff"),  # two of float32
    bytes.fromhex("817fc1ff00800080"),  # two of bfloat16, two negative zeros
]


def there_and_back(codec: str, body: bytes, width: int) -> bytes:
    used, stored = codecs.compress(codec, memoryview(body), width)
    assert used in (codec, "none")
    assert used == "none" or len(stored) < len(body)
    return bytes(codecs.decompress(used, memoryview(stored), len(body), width))


@given(
    dtype=st.sampled_from(sorted(DTYPE_BY_NAME)),
    codec=st.sampled_from(codecs.NAMES),
    pieces=st.lists(st.one_of(st.sampled_from(SPECIAL), st.binary(min_size=8, max_size=8)), max_size=40),
    times=st.sampled_from([1, 7, 64]),
    elements=st.one_of(st.none(), st.integers(0, 40)),
)
@settings(max_examples=400, deadline=None)
def test_any_tensor_of_any_type_comes_back(
    dtype: str, codec: str, pieces: list[bytes], times: int, elements: int | None
) -> None:
    size = DTYPE_BY_NAME[dtype].bytes
    body = b"".join(pieces) * times
    body = body[
        : len(body) // size * size if elements is None else min(elements * size, len(body) // size * size)
    ]
    assert there_and_back(codec, body, DTYPE_BY_NAME[dtype].width) == body


@pytest.mark.parametrize("codec", codecs.NAMES)
@pytest.mark.parametrize("width", sorted({dtype.width for dtype in DTYPE_BY_NAME.values()}))
def test_every_length_around_a_block(codec: str, width: int) -> None:
    """Blocks, blosc's own leftovers, and elements that are no multiple of 8."""
    pattern = b"".join(struct.pack("<f", value / 7) for value in range(1 << 12))
    for base in (0, 120, 1 << 16, 1 << 17, 1 << 20):
        for more in (0, 1, 7, 8, 9, 31):
            length = base + more * width
            body = (pattern * (length // len(pattern) + 1))[:length]
            assert there_and_back(codec, body, width) == body


def test_bits_of_floats_shrink_where_lz4_alone_does_not() -> None:
    generator = random.Random(0)
    body = b"".join(struct.pack("<f", generator.gauss(0, 1))[2:] for _ in range(1 << 16))  # bfloat16, cut off
    assert codecs.compress("lz4", memoryview(body), 2)[0] == "none"
    used, stored = codecs.compress("bitshuffle", memoryview(body), 2)
    assert used == "bitshuffle"
    assert len(body) / len(stored) > 1.15


@pytest.mark.parametrize("codec", COMPRESSING)
def test_what_does_not_shrink_is_stored_as_it_is(codec: str) -> None:
    body = random.Random(1).randbytes(1 << 16)
    used, stored = codecs.compress(codec, memoryview(body), 1)
    assert (used, bytes(stored)) == ("none", body)


# -- stored bodies that somebody has made -------------------------------------------------------------


def chunk(width: int = 4, elements: int = 1 << 17) -> tuple[bytes, bytes]:
    """(body, its chunk) of several blocks, with compressed and stored parts."""
    body = b"".join(struct.pack("<f", value * value / 3) for value in range(elements * width // 4))
    used, stored = codecs.compress("bitshuffle", memoryview(body), width)
    assert used == "bitshuffle"
    return body, bytes(stored)


def changed(stored: bytes, layout: str, offset: int, value: int) -> bytes:
    buffer = bytearray(stored)
    struct.pack_into(layout, buffer, offset, value)
    return bytes(buffer)


def test_a_chunk_whose_length_lies_never_reaches_the_library() -> None:
    """blosc follows both of these out of the chunk, and the process dies."""
    body, stored = chunk()
    lying = changed(stored, "<I", 12, 0x7FFFFFFF)
    blocks = -(-len(body) // struct.unpack_from("<I", stored, 8)[0])
    for block in range(blocks):
        lying = changed(lying, "<I", 16 + 4 * block, 0x70000000)
    with pytest.raises(RecordCorrupt, match=f"not {len(body)} in {len(stored)}"):
        codecs.decompress("bitshuffle", memoryview(lying), len(body), 4)
    honest = changed(lying, "<I", 12, len(stored))
    with pytest.raises(RecordCorrupt, match="outside"):
        codecs.decompress("bitshuffle", memoryview(honest), len(body), 4)


BODY, CHUNK = chunk()
BAD_HEADERS: list[tuple[str, Callable[[], bytes]]] = [
    ("less than a header", lambda: CHUNK[:15]),
    ("less than a header", lambda: b""),
    ("not of bit shuffle and lz4", lambda: changed(CHUNK, "<B", 0, 3)),  # a later blosc
    ("not of bit shuffle and lz4", lambda: changed(CHUNK, "<B", 2, 0x04)),  # blosclz, which has overflows
    ("not of bit shuffle and lz4", lambda: changed(CHUNK, "<B", 2, 0x26)),  # "stored as it is"
    ("not of bit shuffle and lz4", lambda: changed(CHUNK, "<B", 2, 0x84)),  # zstd
    ("bytes an element", lambda: changed(CHUNK, "<B", 3, 0)),
    ("bytes an element", lambda: changed(CHUNK, "<B", 3, 8)),
    ("not 524288 in", lambda: changed(CHUNK, "<I", 4, 0x7FFFFFFF)),  # a bomb
    ("not 524288 in", lambda: changed(CHUNK, "<I", 4, 0)),
    ("not 524288 in", lambda: CHUNK[:-1]),
    ("cannot have blocks", lambda: changed(CHUNK, "<I", 8, 0)),
    ("cannot have blocks", lambda: changed(CHUNK, "<I", 8, 0xFFFFFFFF)),
    ("cannot have blocks", lambda: changed(CHUNK, "<I", 8, 4097)),  # blosc would leave a byte unwritten
    ("before the table", lambda: changed(CHUNK, "<I", 8, 4)),
    ("outside", lambda: changed(CHUNK, "<I", 16, 16)),
    ("outside", lambda: changed(CHUNK, "<I", 16, len(CHUNK) - 3)),
]


@pytest.mark.parametrize(("message", "make"), BAD_HEADERS)
def test_headers_that_this_program_cannot_have_written(message: str, make: Callable[[], bytes]) -> None:
    with pytest.raises(RecordCorrupt, match=message):
        codecs.decompress("bitshuffle", memoryview(make()), len(BODY), 4)


def test_blocks_over_the_bound() -> None:
    header = struct.pack("<BBBBIII", 2, 1, 0x24, 4, 8 << 20, 2 << 20, 64)
    with pytest.raises(RecordCorrupt, match="cannot have blocks"):
        codecs.check_chunk(memoryview(header.ljust(64, b"\0")), 8 << 20, 4)


@given(
    where=st.lists(
        st.tuples(st.sampled_from(["table", "length", "any"]), st.integers(0)), min_size=1, max_size=6
    ),
    values=st.lists(
        st.one_of(st.integers(0, (1 << 32) - 1), st.sampled_from([0, 255, 0x7FFFFFFF])), min_size=6
    ),
    cut=st.one_of(st.none(), st.integers(16, len(CHUNK))),
    other_thread=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_fault_21_a_damaged_chunk_is_refused_or_decompresses_within_its_bound(
    where: list[tuple[str, int]], values: list[int], cut: int | None, other_thread: bool
) -> None:
    """What passes the checks reaches the library, in the main thread also with its own threads."""
    blocks = -(-len(BODY) // struct.unpack_from("<I", CHUNK, 8)[0])
    buffer = bytearray(CHUNK)
    for (kind, at), value in zip(where, values, strict=False):
        if kind == "table":
            struct.pack_into("<I", buffer, 16 + 4 * (at % blocks), value % len(CHUNK))
        elif kind == "length":
            struct.pack_into("<I", buffer, struct.unpack_from("<I", CHUNK, 16 + 4 * (at % blocks))[0], value)
        else:
            buffer[16 + at % (len(CHUNK) - 16)] = value & 255
    if cut is not None:
        buffer = buffer[:cut]
        struct.pack_into("<I", buffer, 12, len(buffer))
    result: list[int] = []

    def decompress() -> None:
        try:
            result.append(len(codecs.decompress("bitshuffle", memoryview(bytes(buffer)), len(BODY), 4)))
        except RecordCorrupt:
            result.append(len(BODY))

    if other_thread:
        thread = threading.Thread(target=decompress)
        thread.start()
        thread.join()
    else:
        decompress()
    assert result == [len(BODY)]


@given(data=st.binary(max_size=400), codec=st.sampled_from(COMPRESSING), raw_bytes=st.integers(1, 1 << 16))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused(data: bytes, codec: str, raw_bytes: int) -> None:
    try:
        assert len(codecs.decompress(codec, memoryview(data), raw_bytes, 1)) == raw_bytes
    except RecordCorrupt:
        pass


def test_a_damaged_block_is_said() -> None:
    starts = struct.unpack_from("<2I", CHUNK, 16)
    for value in (0x7FFFFFFF, 0xFFFFFFFF, 1):
        with pytest.raises(RecordCorrupt, match="does not decompress"):
            codecs.decompress("bitshuffle", memoryview(changed(CHUNK, "<I", starts[1], value)), len(BODY), 4)


def test_widths_are_those_of_numbers() -> None:
    widths = {name: dtype.width for name, dtype in DTYPE_BY_NAME.items() if dtype.width != dtype.bytes}
    assert widths == {"complex32": 2, "complex64": 4, "complex128": 8}
    assert all(a != b for a, b in pairwise(codecs.NAMES))
