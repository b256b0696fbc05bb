"""Decoders against bytes that somebody else wrote: an error of ours, or what was meant; never more memory.

Random bytes end in the first check, so most examples are valid ones with something changed, some of them with
the checksum made right again, which is what an attacker would do.
"""

import struct
import tracemalloc
from pathlib import Path

import crc32c
import lz4.block
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift_ft._pb import log_pb2
from swift_ft.errors import LogError
from swift_ft.log import segment
from swift_ft.log.frame import CODEC_LZ4, CODEC_NONE, decode_header, decode_record
from swift_ft.log.protocol import frames_message, split_frames
from swift_ft.log.record import digest_of
from swift_ft_services.logserver.storage import DirectoryStorage, JobMeta, StreamMeta
from tests.unit.log.frames import JOB, STREAM, frame_of, segment_bytes

BODY_BYTES_MAX = 1 << 16
MEMORY_MAX = 4 << 20
"""What decoding one example may take at most; the largest body that is allowed is 64 KiB."""


@st.composite
def changed(draw: st.DrawFn, whole: bytes) -> bytes:
    """Something flipped, cut, put in, doubled, or overwritten with a number that means much."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "cut", "insert", "double", "number"]))
        at = draw(st.integers(0, max(0, len(data) - 1)))
        if not data:
            break
        if kind == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=64))
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
        else:
            number = draw(st.sampled_from([0, 1, 0xFF, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]))
            data[at : at + 8] = struct.pack("<Q", number)[: len(data) - at]
    return bytes(data)


def frame(codec: int = CODEC_NONE) -> bytes:
    if codec == CODEC_NONE:
        return frame_of(3)[1]
    body = bytes(4096)
    stored = lz4.block.compress(body, store_size=False)
    tensor = {"dtype": "float32", "shape": (32, 32), "digest": digest_of("float32", (32, 32), body)}
    return frame_of(3, body=stored, codec=codec, raw_bytes=len(body), **tensor)[1]


def with_checksum(data: bytes) -> bytes:
    """The header's checksum made right, if there is room for one."""
    if len(data) < 16:
        return data
    length = struct.unpack_from("<H", data, 6)[0]
    crc = crc32c.crc32c(data[12 : min(len(data), max(12, length))])
    return data[:8] + struct.pack("<I", crc) + data[12:]


def decode(data: bytes) -> None:
    """As the server and the reader do. Only errors of ours may come out."""
    tracemalloc.start()
    try:
        header = decode_header(memoryview(data), 0, BODY_BYTES_MAX)
        assert 0 <= header.stored_bytes <= BODY_BYTES_MAX
        end = header.frame_bytes
        if end <= len(data):
            record = decode_record(header, memoryview(data)[header.header_bytes : end])
            assert digest_of(record.dtype, record.shape, record.body) == record.digest
    except LogError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY_MAX


@given(data=st.binary(max_size=512))
def test_frames_of_random_bytes(data: bytes) -> None:
    decode(data)
    decode(b"SWFR" + data)
    decode(with_checksum(frame()[:4] + data))


@settings(max_examples=300)
@pytest.mark.parametrize("codec", [CODEC_NONE, CODEC_LZ4])
@given(data=st.data())
def test_changed_frames(codec: int, data: st.DataObject) -> None:
    mutant = data.draw(changed(frame(codec)))
    decode(mutant)
    decode(with_checksum(mutant))


@st.composite
def another_digit(draw: st.DrawFn, whole: bytes) -> bytes:
    """As good a text as it was, which says something else."""
    at = draw(st.sampled_from([at for at, byte in enumerate(whole) if chr(byte).isdigit()]))
    return whole[:at] + str(draw(st.integers(0, 9))).encode() + whole[at + 1 :]


@settings(max_examples=300)
@given(data=st.data())
def test_messages_with_frames(data: st.DataObject) -> None:
    """`split_frames` and protobuf agree on what a message is, whatever was done to it."""
    whole = frames_message([frame()], len(frame()))
    mutant = data.draw(changed(whole) | st.binary(max_size=64))
    split = split_frames(mutant)
    try:
        parsed = log_pb2.AppendRequest.FromString(mutant)
    except DecodeError:
        assert split is None
    else:
        if split is not None:
            assert bytes(split) == parsed.frames
            assert not parsed.opens


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_segment_files(tmp_path: Path, data: st.DataObject) -> None:
    """What a walk of a changed file calls a record is one of those that were written, bit for bit."""
    sealed = data.draw(st.booleans())
    whole = segment_bytes(0, 5, sealed=sealed)
    path = tmp_path / segment.segment_name(0)
    path.write_bytes(data.draw(changed(whole) | st.binary(max_size=400)))
    known = {frame_of(sequence)[1] for sequence in range(5)}
    scan = segment.walk(path)
    content = path.read_bytes()
    for record in scan.records:
        if not record.damaged:
            assert content[record.offset : record.offset + record.header.frame_bytes] in known
    assert 0 <= scan.end <= len(content)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_manifests(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A server starts with what was written, or says in one line why not."""
    directory = tmp_path_factory.mktemp("log")
    meta = JobMeta(generation=3, trimmed_below_step=2, streams={STREAM: StreamMeta(4, 4, "")})
    meta.job, meta.uid = JOB, bytes(16).hex()
    storage = DirectoryStorage(directory, 1 << 20, new_uid=lambda: bytes(16))
    storage.save(JOB, meta)
    storage.close()
    (manifest,) = [path for path in (directory / JOB).iterdir() if path.is_file()]
    whole = manifest.read_bytes().rstrip(b"\0")  # most of it is padding
    manifest.write_bytes(data.draw(changed(whole) | another_digit(whole) | st.binary(max_size=200)))
    again = DirectoryStorage(directory, 1 << 20)
    (job,) = again.recover()
    again.close()
    assert job.meta == meta if not job.apart else "\n" not in job.apart
