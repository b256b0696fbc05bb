"""What a start allocates is bounded by the files that there are, whatever they say."""

import os
import tracemalloc
from pathlib import Path

from swift_ft.log.directory import NAME as ACKED
from swift_ft.log.frame import FrameHeader, encode_header
from tests.unit.log.frames import frame_of
from tests.unit.log.storages import FRAME, SEGMENT_HEADER_BYTES, OnDisk, crash, files, on_disk, reopened

BYTES_MAX = 16 << 20


def peak_of_a_start(directory: Path) -> int:
    storage = OnDisk(directory)
    tracemalloc.start()
    try:
        storage.recover()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        crash(storage)


def test_any_flipped_bit_of_a_segment(tmp_path: Path) -> None:
    for sealed in (False, True):
        data = tmp_path / str(sealed)
        storage = on_disk(data, records=2)
        storage.close() if sealed else crash(storage)
        (path,) = files(data)
        whole = path.read_bytes()
        interesting = [
            *range(0, SEGMENT_HEADER_BYTES, 3),
            *range(SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES + FRAME),
        ]
        for at in [*interesting, *range(len(whole) - 64, len(whole))]:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            assert peak_of_a_start(data) < BYTES_MAX


def test_a_sound_frame_behind_damage_that_claims_a_sequence_far_away(tmp_path: Path) -> None:
    """Its records before would be places in memory, each of them."""
    data = tmp_path / "data"
    storage = on_disk(data, records=3)
    crash(storage)
    (path,) = files(data)
    header, frame = frame_of(1)
    far = FrameHeader(**{**{name: getattr(header, name) for name in header.__slots__}, "sequence": 1 << 27})
    body = frame[header.header_bytes :]
    whole = bytearray(path.read_bytes())
    begin = SEGMENT_HEADER_BYTES + FRAME
    whole[begin : begin + FRAME] = encode_header(far) + body
    whole[SEGMENT_HEADER_BYTES + 20] ^= 1
    path.write_bytes(whole)
    assert peak_of_a_start(data) < BYTES_MAX


def test_a_large_file_of_what_was_acknowledged_that_has_nothing_in_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    storage = on_disk(data, records=3)
    crash(storage)
    os.truncate(data / ACKED, 1 << 40)
    assert peak_of_a_start(data) < BYTES_MAX
    assert reopened(data)[1].appended == 3
