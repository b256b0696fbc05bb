"""The frame: its bytes, and that no other bytes are ever taken for a record."""

import itertools
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import RecordCorrupt, RecordInvalid, UsageError
from swift_ft.log.codec import compress
from swift_ft.log.frame import (
    BODY_BYTES_MAX,
    CODEC_BITSHUFFLE,
    CODEC_LZ4,
    CODEC_NONE,
    CODECS,
    FIXED_BYTES,
    MESSAGE_BYTES,
    Assembler,
    FrameHeader,
    FrameIncomplete,
    cut,
    decode_header,
    decode_record,
    encode_header,
    raw_bytes_of,
)
from swift_ft.log.record import (
    DTYPE_BY_CODE,
    DTYPE_BY_NAME,
    STEP_MAX,
    Record,
    RecordKey,
    as_bytes,
    check_name,
    digest_of,
    stream_tag,
)
from tests.unit.log.frames import frame_of

KEY = RecordKey(17, 3, 1)
GOLDEN = Path(__file__).parents[2] / "golden" / "log" / "frame.txt"


def make_frame(
    body: bytes,
    dtype: str = "uint8",
    shape: tuple[int, ...] | None = None,
    codec: int = CODEC_NONE,
    sequence: int = 5,
    key: RecordKey = KEY,
) -> tuple[FrameHeader, bytes]:
    if shape is None:
        shape = (len(body) // DTYPE_BY_NAME[dtype].bytes,)
    name = next(name for name, number in CODECS.items() if number == codec)
    used, stored = compress(name, memoryview(body), DTYPE_BY_NAME[dtype].width)
    header = FrameHeader(
        stream_tag=stream_tag("job", "s0.F"),
        sequence=sequence,
        generation=2,
        key=key,
        dtype=dtype,
        shape=shape,
        codec=CODECS[used],
        raw_bytes=len(body),
        stored_bytes=len(stored),
        body_crc=crc32c.crc32c(stored),
        digest=digest_of(dtype, shape, body),
    )
    return header, encode_header(header) + bytes(stored)


def read_back(frame: bytes, body_bytes_max: int = BODY_BYTES_MAX) -> Record:
    header = decode_header(frame, 0, body_bytes_max)
    if len(frame) < header.frame_bytes:
        raise FrameIncomplete("short")
    return decode_record(header, memoryview(frame)[header.header_bytes : header.frame_bytes])


def resealed(frame: bytes, offset: int, layout: str, value: int | bytes) -> bytes:
    """The frame with one field changed and its header checksum made to match."""
    changed = bytearray(frame)
    struct.pack_into(layout, changed, offset, value)
    ndim = changed[74]
    crc = crc32c.crc32c(bytes(changed[12 : FIXED_BYTES + 8 * ndim]))
    struct.pack_into("<I", changed, 8, crc)
    return bytes(changed)


def test_the_bytes_of_a_frame_do_not_change(golden: Callable[[Path, str], None]) -> None:
    """What is on a disk today must be readable for ever."""
    frames = [
        make_frame(bytes(range(16)), "bfloat16", (2, 4))[1],
        make_frame(b"", "float32", (0, 3))[1],
        make_frame(struct.pack("<f", -0.0), "float32", ())[1],
        make_frame(bytes(400), "float32", (100,), CODEC_LZ4)[1],
        make_frame(struct.pack("<100f", *range(100)), "float32", (100,), CODEC_BITSHUFFLE)[1],
    ]
    text = "".join(
        "\n".join(frame[at : at + 16].hex(" ") for at in range(0, len(frame), 16)) + "\n\n"
        for frame in frames
    )
    golden(GOLDEN, text)
    for frame in frames:
        read_back(frame)


DTYPES_BY_CODE = """
bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128
float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint16 uint32 uint64 complex32
"""


def test_codes_of_element_types_do_not_change() -> None:
    names = " ".join(DTYPE_BY_CODE[code].name for code in range(1, len(DTYPE_BY_CODE) + 1))
    assert names == " ".join(DTYPES_BY_CODE.split())


def test_numbers_of_codecs_do_not_change() -> None:
    """The golden frames are stored without bitshuffle."""
    assert CODECS == {"none": 0, "lz4": 1, "bitshuffle": 2}


def test_digest_tells_type_and_shape_apart() -> None:
    body = bytes(24)
    digests = {
        digest_of("int32", (6,), body),
        digest_of("float32", (6,), body),
        digest_of("int32", (2, 3), body),
        digest_of("int32", (3, 2), body),
        digest_of("int64", (3,), body),
    }
    assert len(digests) == 5


def test_every_changed_bit_of_a_frame_is_noticed() -> None:
    _, frame = make_frame(bytes(range(24)), "float32", (2, 3))
    for at in range(len(frame)):
        for bit in range(8):
            changed = bytearray(frame)
            changed[at] ^= 1 << bit
            with pytest.raises((RecordCorrupt, RecordInvalid, FrameIncomplete)):
                read_back(bytes(changed))


def test_every_cut_of_a_frame_is_incomplete() -> None:
    _, frame = make_frame(bytes(range(24)), "float32", (2, 3))
    for length in range(len(frame)):
        with pytest.raises(FrameIncomplete):
            read_back(frame[:length])


@given(
    dtype=st.sampled_from(sorted(DTYPE_BY_NAME)),
    shape=st.lists(st.integers(0, 4), max_size=8).map(tuple),
    data=st.data(),
    codec=st.sampled_from([CODEC_NONE, CODEC_LZ4, CODEC_BITSHUFFLE]),
    step=st.integers(0, STEP_MAX),
)
@settings(max_examples=150, deadline=None)
def test_any_record_comes_back(
    dtype: str, shape: tuple[int, ...], data: st.DataObject, codec: int, step: int
) -> None:
    size = raw_bytes_of(dtype, shape)
    body = data.draw(st.binary(min_size=min(size, 64), max_size=min(size, 64))).ljust(size, b"\x07")
    _, frame = make_frame(body, dtype, shape, codec, key=RecordKey(step, 1, 2))
    record = read_back(frame)
    assert (record.key.step, record.shape, bytes(record.body)) == (step, shape, body)


def test_fault_19_shape_that_overflows_and_negative_dimension() -> None:
    _, frame = make_frame(b"", "uint8", (0, 1))
    for value in (1 << 63, (1 << 64) - 1):  # -(1 << 63) and -1, if it were signed
        with pytest.raises(RecordInvalid, match="not allowed"):
            decode_header(resealed(frame, 136, "<Q", value))
    _, frame = make_frame(b"", "uint8", (1 << 62, 4, 0))
    assert decode_header(frame).raw_bytes == 0
    with pytest.raises(RecordInvalid):  # 1 << 64, which is 0 in 64 bits
        decode_header(resealed(frame, 144, "<Q", 1))
    nine_dimensions = resealed(frame, 74, "<B", 9)
    with pytest.raises(RecordCorrupt, match="9 dimensions"):
        decode_header(nine_dimensions)


def test_fault_21_a_body_is_as_long_as_its_header_says() -> None:
    header, frame = make_frame(bytes(1 << 20), codec=CODEC_LZ4)
    stored = memoryview(frame)[header.header_bytes :]
    with pytest.raises(RecordInvalid, match="cannot hold"):  # a ratio that lz4 does not have
        decode_header(encode_header(replace(header, raw_bytes=1 << 27, shape=(1 << 27,))))
    for claimed in (1 << 19, (1 << 20) + 1):  # less and more than it gives
        liar = replace(header, raw_bytes=claimed, shape=(claimed,))
        with pytest.raises(RecordCorrupt, match="lz4"):
            decode_record(decode_header(encode_header(liar)), stored)


def test_fault_42_unknown_version_codec_type_and_reserved_bytes() -> None:
    _, frame = make_frame(bytes(24))
    for changed, message in [
        (resealed(frame, 4, "<H", 2), "version 2"),
        (resealed(frame, 72, "<B", 9), "codec 9"),
        (resealed(frame, 73, "<B", 200), "element type 200"),
        (resealed(frame, 75, "<B", 1), "reserved"),
        (resealed(frame, 76, "<I", 1), "reserved"),
        (resealed(frame, 96, "32s", b"x" * 32), "reserved"),
    ]:
        with pytest.raises(RecordInvalid, match=message):
            decode_header(changed)


def test_a_body_that_decompresses_to_another_tensor_is_refused() -> None:
    header, frame = make_frame(bytes(range(64)))
    other = replace(header, digest=digest_of("uint8", (64,), bytes(64)))
    with pytest.raises(RecordCorrupt, match="digest"):
        decode_record(other, memoryview(frame)[header.header_bytes :])


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/a", "a\0b", "a b", "ä", ".hidden", "-x", "x" * 65, "x\n"]
)
def test_fault_40_names_that_could_leave_the_directory(name: str) -> None:
    with pytest.raises(UsageError):
        check_name("stream", name)


def test_names_of_streams() -> None:
    for name in ("s0.F", "r12.C", "job-1_a", "x" * 64):
        assert check_name("stream", name) == name
    assert stream_tag("a", "b") != stream_tag("a/b", "")


def test_bodies_are_flat_views() -> None:
    assert as_bytes(memoryview(bytes(8)).cast("I")).nbytes == 8
    assert as_bytes(memoryview(bytearray())).nbytes == 0
    with pytest.raises(UsageError, match="contiguous"):
        as_bytes(memoryview(bytes(8))[::2])


# -- frames come out of messages however these are cut within bodies -----------------------------------


SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=6)


@given(sizes=SIZES, cuts=st.lists(st.integers(0, 3000), max_size=12))
def test_any_cuts_outside_of_headers(sizes: list[int], cuts: list[int]) -> None:
    frames = [frame_of(i, body=bytes(i % 251 for i in range(size))) for i, size in enumerate(sizes)]
    whole = b"".join(frame for _, frame in frames)
    headers: set[int] = set()
    at = 0
    for header, frame in frames:
        headers |= set(range(at + 1, at + header.header_bytes))
        at += len(frame)
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole) and cut not in headers)})
    assembler = Assembler(1 << 20)
    found = []
    for begin, end in itertools.pairwise(edges):
        found += list(assembler.feed(memoryview(whole[begin:end])))
    assembler.finish()
    assert [header for header, _ in found] == [header for header, _ in frames]
    assert [b"".join(parts) for _, parts in found] == [frame for _, frame in frames]


def test_a_cut_within_a_header_is_refused() -> None:
    _, frame = frame_of(0)
    with pytest.raises(FrameIncomplete):
        list(Assembler(1 << 20).feed(memoryview(frame[:100])))


@given(at=st.integers(136, 159), cut_at=st.integers(136, 160))
def test_a_flip_in_a_body_is_found_in_whichever_piece(at: int, cut_at: int) -> None:
    header, frame = frame_of(0)
    assert (header.header_bytes, len(frame)) == (136, 160)
    changed = bytearray(frame)
    changed[at] ^= 1
    assembler = Assembler(1 << 20)
    with pytest.raises(RecordCorrupt):
        list(assembler.feed(memoryview(changed)[:cut_at])) + list(
            assembler.feed(memoryview(changed)[cut_at:])
        )


def test_the_end_within_a_frame_is_refused() -> None:
    _, frame = frame_of(0)
    assembler = Assembler(1 << 20)
    assert list(assembler.feed(memoryview(frame[:-1]))) == []
    with pytest.raises(RecordInvalid, match="1 bytes of its frame never came"):
        assembler.finish()


@given(st.integers(0, 5 * MESSAGE_BYTES))
def test_pieces_are_even_and_small(size: int) -> None:
    body = memoryview(bytearray(size))
    sizes = [len(piece) for piece in cut(body)]
    assert sum(sizes) == size
    assert max(sizes) <= MESSAGE_BYTES
    assert max(sizes) - min(sizes) < len(sizes)
