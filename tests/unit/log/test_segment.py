"""How a segment file ends, and that damage is never taken for an end: the whole table of cases."""

from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft.errors import RecordCorrupt
from swift_ft.log.segment import (
    BLOCK_BYTES,
    FOOTER_BYTES,
    SEGMENT_HEADER_BYTES,
    Ending,
    SegmentHeader,
    encode_footer,
    encode_segment_header,
    padding,
    scan,
    segment_name,
    walk,
)
from tests.unit.log.frames import JOB, STREAM, frame_of, segment_bytes, write_segment

FRAME = len(frame_of(0)[1])


def sequences(path: Path, *, last: bool = True) -> list[int]:
    return [record.header.sequence for record in walk(path, last=last).records if not record.damaged]


def test_the_bytes_of_a_segment_do_not_change(golden: Callable[[Path, str], None]) -> None:
    data = segment_bytes(7, 1, sealed=True)
    text = "\n".join(data[at : at + 16].hex(" ") for at in range(0, len(data), 16)) + "\n"
    golden(Path(__file__).parents[2] / "golden" / "log" / "segment.txt", text)


def test_clean_and_sealed(tmp_path: Path) -> None:
    for sealed, ending in [(False, Ending.CLEAN), (True, Ending.SEALED)]:
        found = scan(write_segment(tmp_path, 5, segment_bytes(5, 3, sealed=sealed)))
        assert [record.header.sequence for record in found.records] == [5, 6, 7]
        assert (found.ending, found.damage, found.torn_bytes) == (ending, [], 0)
        assert found.end == SEGMENT_HEADER_BYTES + 3 * FRAME
        assert found.header == SegmentHeader(JOB, STREAM, 5)


def test_fault_11_torn_tail_at_every_byte_of_the_last_record(tmp_path: Path) -> None:
    data = segment_bytes(0, 3)
    boundary = len(data) - FRAME
    for length in range(boundary, len(data)):
        found = scan(write_segment(tmp_path, 0, data[:length]))
        assert [record.header.sequence for record in found.records] == [0, 1]
        assert found.end == boundary
        assert found.torn_bytes == length - boundary
        assert found.ending is (Ending.CLEAN if length == boundary else Ending.TORN)


def test_fault_11_torn_segment_header(tmp_path: Path) -> None:
    """Killed while it made the file: no record can have been acknowledged in it."""
    data = segment_bytes(4, 0)
    for torn in [data[:length] for length in range(SEGMENT_HEADER_BYTES)] + [bytes(SEGMENT_HEADER_BYTES)]:
        found = scan(write_segment(tmp_path, 4, torn))
        assert (found.header, found.records, found.ending) == (None, [], Ending.TORN)
        if torn:
            with pytest.raises(RecordCorrupt):  # not if a later segment exists
                raise_first(write_segment(tmp_path, 4, torn))


def raise_first(path: Path) -> None:
    damage = walk(path, last=False).damage
    if damage:
        raise RecordCorrupt(damage[0].reason)


@pytest.mark.parametrize("sealed", [False, True])
def test_fault_12_a_flip_at_every_byte_of_a_middle_record_is_refused(tmp_path: Path, sealed: bool) -> None:
    data = segment_bytes(0, 3, sealed=sealed)
    begin = SEGMENT_HEADER_BYTES + FRAME
    for at in range(begin, begin + FRAME):
        changed = bytearray(data)
        changed[at] ^= 0x10
        path = write_segment(tmp_path, 0, bytes(changed))
        with pytest.raises(RecordCorrupt, match="record 1 at offset"):
            scan(path)
        found = walk(path)
        # The records around it are still found.
        assert [record.header.sequence for record in found.records if not record.damaged] == [0, 2]
        assert [(damage.sequence, damage.end_sequence) for damage in found.damage] == [(1, 2)]


def test_a_flip_at_every_byte_of_the_last_whole_record_is_not_taken_for_a_torn_tail(tmp_path: Path) -> None:
    data = segment_bytes(0, 2)
    begin = SEGMENT_HEADER_BYTES + FRAME
    for at in range(begin, len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x10
        with pytest.raises(RecordCorrupt, match="record 1 at offset"):
            scan(write_segment(tmp_path, 0, bytes(changed)))


def test_a_flip_at_every_byte_of_the_segment_header_is_refused(tmp_path: Path) -> None:
    data = segment_bytes(0, 2)
    for at in range(SEGMENT_HEADER_BYTES):
        changed = bytearray(data)
        changed[at] ^= 0x10
        with pytest.raises(RecordCorrupt):
            scan(write_segment(tmp_path, 0, bytes(changed)))


def test_a_flip_at_every_byte_of_the_footer(tmp_path: Path) -> None:
    """No footer any more: in the last segment a torn tail behind whole records, else damage."""
    data = segment_bytes(0, 2, sealed=True)
    for at in range(len(data) - FOOTER_BYTES, len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x10
        path = write_segment(tmp_path, 0, bytes(changed))
        assert sequences(path) == [0, 1]
        assert walk(path).ending is Ending.TORN
        assert walk(path, last=False).damage


def test_fault_15_sealed_file_cut_on_a_record_boundary(tmp_path: Path) -> None:
    """With the footer moved up, or without it in a segment that is not the last one."""
    data = segment_bytes(0, 3, sealed=True)
    cut = data[: -FOOTER_BYTES - FRAME]
    path = write_segment(tmp_path, 0, cut + data[-FOOTER_BYTES:])
    assert walk(path, last=False).damage
    # The cut alone looks like a clean end: the next segment's name, or the manifest, tells (test_storage).
    assert walk(write_segment(tmp_path, 0, cut), last=False).ending is Ending.CLEAN


def test_fault_16_zero_filled_tail(tmp_path: Path) -> None:
    data = segment_bytes(0, 2)
    for zeros in (1, 127, 128, 4096):
        path = write_segment(tmp_path, 0, data + bytes(zeros))
        found = scan(path)
        assert (found.ending, found.torn_bytes, len(found.records)) == (Ending.TORN, zeros, 2)
        assert walk(path, last=False).damage
    # Zeros with something behind them are not an end.
    with pytest.raises(RecordCorrupt):
        scan(write_segment(tmp_path, 0, data + bytes(4096) + b"x"))


def test_zeros_that_fill_a_block_are_no_torn_tail(tmp_path: Path) -> None:
    data = segment_bytes(0, 2)
    filled = data + padding(len(data))
    for last in (True, False):
        found = walk(write_segment(tmp_path, 0, filled), last=last)
        assert (found.ending, found.damage, found.torn_bytes) == (Ending.CLEAN, [], 0)
        assert found.end == len(data)
    for more in (1, BLOCK_BYTES):
        path = write_segment(tmp_path, 0, filled + bytes(more))
        assert walk(path).ending is Ending.TORN
        assert walk(path, last=False).damage
    with pytest.raises(RecordCorrupt):
        scan(write_segment(tmp_path, 0, filled[:-1] + b"x"))


def test_a_footer_stands_within_a_block_behind_the_frames(tmp_path: Path) -> None:
    data = segment_bytes(0, 2)
    footer = encode_footer(SegmentHeader(JOB, STREAM, 0), 2, len(data))
    for zeros in (0, 1, 4095):
        found = scan(write_segment(tmp_path, 0, data + bytes(zeros) + footer))
        assert (found.ending, found.end) == (Ending.SEALED, len(data))
    assert walk(write_segment(tmp_path, 0, data + bytes(BLOCK_BYTES) + footer)).ending is not Ending.SEALED


def test_fault_17_stale_bytes_of_another_segment(tmp_path: Path) -> None:
    data = segment_bytes(0, 2)
    for stale in (frame_of(2, stream="s1.F")[1], frame_of(9)[1], frame_of(1)[1]):
        path = write_segment(tmp_path, 0, data + stale)
        with pytest.raises(RecordCorrupt, match="record 2 at offset"):
            scan(path)
        assert sequences(path)[:2] == [0, 1]
    with pytest.raises(RecordCorrupt, match="starts with record 0"):
        scan(write_segment(tmp_path, 3, data))


def test_damage_then_a_gap_is_told_whole(tmp_path: Path) -> None:
    """Two records overwritten: the next one that is sound says how many are gone."""
    data = bytearray(segment_bytes(0, 5))
    begin = SEGMENT_HEADER_BYTES + FRAME
    data[begin : begin + 2 * FRAME] = b"\xaa" * (2 * FRAME)
    found = walk(write_segment(tmp_path, 0, bytes(data)))
    assert [(damage.sequence, damage.end_sequence) for damage in found.damage] == [(1, 3)]
    assert [record.header.sequence for record in found.records] == [0, 3, 4]


def test_damage_to_the_end(tmp_path: Path) -> None:
    data = segment_bytes(0, 2) + b"\xaa" * 1000
    found = walk(write_segment(tmp_path, 0, data))
    assert [(damage.sequence, damage.end_sequence) for damage in found.damage] == [(2, None)]


def test_scan_without_bodies_trusts_only_sealed_segments(tmp_path: Path) -> None:
    for sealed in (False, True):
        data = bytearray(segment_bytes(0, 3, sealed=sealed))
        data[SEGMENT_HEADER_BYTES + 2 * FRAME - 1] ^= 1  # the body of record 1
        found = walk(write_segment(tmp_path, 0, bytes(data)), verify_bodies=False)
        assert bool(found.damage) is not sealed


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, segment_bytes(0, 1))
    link = tmp_path / segment_name(1)
    link.symlink_to(segment_name(0))
    with pytest.raises(OSError, match="symbolic"):
        scan(link)


def test_names_are_sixty_four_bytes_long_at_most() -> None:
    header = SegmentHeader("j" * 64, "s" * 64, 0)
    assert len(encode_segment_header(header)) == SEGMENT_HEADER_BYTES
