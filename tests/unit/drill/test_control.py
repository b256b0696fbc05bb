"""The negative control: every single bit of a segment file counts."""

import random
from pathlib import Path

import crc32c
import pytest

from swift_ft.errors import LogError
from swift_ft.lab.drill import run
from swift_ft.lab.failures import damage
from swift_ft.log import frame, segment
from swift_ft.log.record import RecordKey, digest_of, stream_tag

JOB, STREAM = "drill", "s1.F"


def write_segment(directory: Path, steps: range, body_bytes: int = 16) -> Path:
    """As the log server would: two microbatches a step."""
    path = directory / JOB / STREAM / segment.segment_name(0)
    path.parent.mkdir(parents=True)
    data = segment.encode_segment_header(segment.SegmentHeader(JOB, STREAM, 0))
    generator = random.Random(0)
    for sequence, (step, microbatch) in enumerate((s, m) for s in steps for m in range(2)):
        body = memoryview(generator.randbytes(body_bytes))
        header = frame.FrameHeader(
            stream_tag=stream_tag(JOB, STREAM),
            sequence=sequence,
            generation=1,
            key=RecordKey(step, microbatch, 0),
            dtype="uint8",
            shape=(body_bytes,),
            codec=0,
            raw_bytes=body_bytes,
            stored_bytes=body_bytes,
            body_crc=crc32c.crc32c(body),
            digest=digest_of("uint8", (body_bytes,), body),
        )
        data += frame.encode_header(header) + bytes(body)
    path.write_bytes(data)
    return path


def test_every_bit_of_a_segment_is_guarded(tmp_path: Path) -> None:
    path = write_segment(tmp_path, range(1))
    whole = segment.scan(path)
    assert len(whole.records) == 2
    unnoticed = []
    for bit in range(whole.end * 8):
        damage.flip(path, bit)
        try:
            segment.scan(path)
            unnoticed.append(bit)
        except LogError:
            pass
        damage.flip(path, bit)
    assert unnoticed == []
    assert len(segment.scan(path).records) == 2, "flipped back"


@pytest.mark.parametrize("seed", range(20))
def test_the_control_catches_its_bit(seed: int, tmp_path: Path) -> None:
    write_segment(tmp_path / "log", range(3))
    copy = run.snapshot([tmp_path / "log"], tmp_path / "control")
    assert copy is not None
    result = run.flip_and_read(copy, seed)
    assert result["caught"] is True
    assert result["records"] == 6
    assert str(tmp_path) not in result["refused"]


def test_a_reader_that_sees_nothing_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_segment(tmp_path, range(3))
    whole = segment.scan(path)
    monkeypatch.setattr(segment, "scan", lambda _: whole)
    assert run.flip_and_read(path, 0)["caught"] is False


def test_without_a_record_there_is_no_control(tmp_path: Path) -> None:
    write_segment(tmp_path / "log", range(0))
    assert run.snapshot([tmp_path / "log"], tmp_path / "control") is None
    assert run.flip_and_read(None, 0)["caught"] is None


def test_a_live_corruption_hits_the_last_step_before_the_kill(tmp_path: Path) -> None:
    path = write_segment(tmp_path, range(5, 9), body_bytes=3000)
    flipped = damage.corrupt_stream([tmp_path], STREAM, 8, seed=3)
    assert flipped is not None
    found = segment.walk(path).damage
    assert [d.end_sequence is not None for d in found] == [True]
    assert found[0].sequence in (4, 5), "the records of step 7"
    assert damage.corrupt_stream([tmp_path], STREAM, 12, seed=3) is None
    assert damage.corrupt_stream([tmp_path], "s0.F", 8, seed=3) is None


def test_a_live_corruption_is_not_where_the_server_would_write_it_whole_again(tmp_path: Path) -> None:
    path = write_segment(tmp_path, range(5, 8), body_bytes=1500)
    last_block = (path.stat().st_size - 1) // 4096 * 4096
    for seed in range(200):
        flipped = damage.corrupt_stream([tmp_path], STREAM, 8, seed=seed)
        assert flipped is not None
        assert flipped["bit"] // 8 < last_block
        damage.flip(path, flipped["bit"])
    small = write_segment(tmp_path / "small", range(5, 8))
    assert small.stat().st_size < 4096
    assert damage.corrupt_stream([tmp_path / "small"], STREAM, 8, seed=0) is None
