"""Frames and segment files for tests."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c

from swift_ft.log.frame import CODEC_NONE, FrameHeader, decode_header, decode_record, encode_header
from swift_ft.log.record import Record, RecordKey, digest_of, stream_tag
from swift_ft.log.segment import SegmentHeader, encode_footer, encode_segment_header, segment_name

JOB = "job"
STREAM = "s0.F"


def body_of(sequence: int, size: int = 24) -> bytes:
    return bytes((sequence * 7 + i) % 255 + 1 for i in range(size))


def frame_of(
    sequence: int,
    *,
    stream: str = STREAM,
    generation: int = 1,
    step: int | None = None,
    microbatch: int = 0,
    slot: int = 0,
    body: bytes | None = None,
    job: str = JOB,
    **fields: Any,
) -> tuple[FrameHeader, bytes]:
    """The frame of record ``sequence``; it is of step ``sequence`` unless told otherwise. ``fields``: of the header,
    as they are."""
    body = body_of(sequence) if body is None else body
    header = FrameHeader(
        stream_tag=stream_tag(job, stream),
        sequence=sequence,
        generation=generation,
        key=RecordKey(sequence if step is None else step, microbatch, slot),
        dtype="uint8",
        shape=(len(body),),
        codec=CODEC_NONE,
        raw_bytes=len(body),
        stored_bytes=len(body),
        body_crc=crc32c.crc32c(body),
        digest=digest_of("uint8", (len(body),), body),
    )
    header = replace(header, **fields)
    return header, encode_header(header) + body


def segment_bytes(first: int, count: int, *, sealed: bool = False, stream: str = STREAM) -> bytes:
    header = SegmentHeader(JOB, stream, first)
    data = encode_segment_header(header)
    for sequence in range(first, first + count):
        data += frame_of(sequence, stream=stream)[1]
    return data + encode_footer(header, count, len(data)) if sealed else data


def write_segment(directory: Path, first: int, data: bytes) -> Path:
    path = directory / segment_name(first)
    path.write_bytes(data)
    return path


def records_of(frames: bytes) -> Iterator[Record]:
    """What a server's answer to a read holds."""
    at = 0
    while at < len(frames):
        header = decode_header(frames, at, 1 << 62)
        end = at + header.frame_bytes
        yield decode_record(header, memoryview(frames)[at + header.header_bytes : end])
        at = end
