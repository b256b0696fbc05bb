"""Frames come out of messages however these are cut within bodies."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.errors import RecordCorrupt, RecordInvalid
from swift_ft.log.frame import MESSAGE_BYTES, Assembler, FrameIncomplete, cut
from tests.unit.log.frames import frame_of

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
