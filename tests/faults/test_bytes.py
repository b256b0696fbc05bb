"""Faults 11 to 22: bytes that are not what was written, on the disk and on the wire, against a real server."""

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import crc32c
import grpc
import lz4.block
import pytest
import torch

from swift_ft._pb import log_pb2
from swift_ft.errors import RecordCorrupt
from swift_ft.log import admin
from swift_ft.log.frame import BODY_BYTES_MAX, CODEC_LZ4, CODECS, FrameHeader, encode_header
from swift_ft.log.protocol import code_of, message_of, reason_of
from swift_ft.log.reader import never
from swift_ft.log.record import DTYPE_BY_NAME, RecordKey
from swift_ft.log.segment import scan
from swift_ft.state.tensors import to_tensor
from tests.faults import shim
from tests.faults.shim import Faults
from tests.faults.world import (
    SIZE,
    TIMEOUT_S,
    Server,
    body_of,
    body_offset,
    fill,
    flip,
    frame_offset,
    key,
    overwrite,
    put,
)
from tests.integration.logserver_world import JOB, python
from tests.log_client import owned_bytes
from tests.patience import eventually
from tests.unit.log.append_call import Call
from tests.unit.log.clients import following, reading
from tests.unit.log.frames import STREAM, frame_of


@pytest.fixture
def big(tmp_path: Path) -> Iterator[Server]:
    """One segment holds all."""
    with Server(tmp_path / "log") as running:
        yield running


def refused_from(server: Server, step: int, stream: str = STREAM) -> None:
    """The steps below can be read, this one never, in whatever way it is asked for."""
    assert server.inventory(stream).corrupt
    with reading(server.address) as reader:
        with following(reader, stream, 0) as cursor:
            for earlier in range(step):
                assert cursor.get(key(earlier), TIMEOUT_S, lambda: False).body == body_of(earlier)
            with pytest.raises(RecordCorrupt):
                cursor.get(key(step), TIMEOUT_S, lambda: False)
        with pytest.raises(RecordCorrupt):
            reader.digests(stream, 0, cancelled=never)


def sent_and_refused(server: Server, frame: bytes) -> tuple[grpc.StatusCode, str]:
    """Whatever it is, nothing of it is in the log, and the next writer goes on."""
    call = Call(server)
    call.open()
    begin = call.opened[STREAM]
    call.send(frame)
    code, reason, _ = call.refused()
    again = Call(server)
    again.open()
    assert again.opened[STREAM] == begin
    again.end()
    return code, reason


def forged(header: FrameHeader, body: bytes) -> bytes:
    """A frame whose checksums are right, whatever else it says."""
    return encode_header(replace(header, body_crc=crc32c.crc32c(body))) + body


# -- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amount", [4096, 12288, 36864])
def test_f11_torn_tail_is_cut_and_counted(tmp_path: Path, faults: Faults, amount: int) -> None:
    """The process is killed when a write has got so far: in the next record's header or body."""
    with Server(tmp_path / "log", faults=faults) as server:
        fill(server, 5)
        server.fence(1)
        writer = server.writer()
        torn = faults.rule(shim.WRITE, shim.RECORDS, shim.TORN, amount=amount, limit=1)
        for step in range(5, 9):
            put(writer, step, size=SIZE)
        server.wait_killed()
        torn.clear()
        server.start()
        (counted,) = server.said("torn_tail")
        assert counted["stream"] == STREAM
        assert counted["bytes"] > 0
        writer.close()  # has sent again what was not acknowledged
        server.check(0, 9)


@pytest.mark.parametrize("clean", [False, True], ids=["unsealed", "sealed"])
def test_f12_checksum_failure_in_the_middle_quarantines_and_refuses_replay(big: Server, clean: bool) -> None:
    fill(big, 5)
    if clean:
        big.stop()
    else:
        big.kill()
    (path,) = big.segments(STREAM)
    flip(path, body_offset(path, 2) + 5000)
    big.start()
    assert not big.said("torn_tail")
    with reading(big.address) as reader:
        with following(reader, STREAM, 0) as cursor:
            for step in (0, 1):
                assert cursor.get(key(step), TIMEOUT_S, lambda: False).body == body_of(step)
            with pytest.raises(RecordCorrupt, match=r"step 2 microbatch 0 slot 0"):
                cursor.get(key(2), TIMEOUT_S, lambda: False)
        assert big.inventory().corrupt
        eventually(lambda: big.said("stream_corrupt"), "the event is written")  # after the refusal
        # What is behind it is still there; and a checkpoint that covers it makes the log good again.
        with following(reader, STREAM, 3) as cursor:
            assert cursor.get(key(3), TIMEOUT_S, lambda: False).body == body_of(3)
        assert admin.trim(big.address, JOB, 3, TIMEOUT_S) == 3
        assert not big.inventory().corrupt


@pytest.mark.parametrize("part", ["body", "header"])
def test_f12_a_damaged_record_that_is_sent_again_takes_its_place(big: Server, part: str) -> None:
    """Its writer never heard that it was durable, and comes back when the server does."""
    fill(big, 2)
    first = Call(big)
    first.open()
    frames = [frame_of(sequence, body=body_of(sequence))[1] for sequence in range(2, 6)]
    first.send(*frames)
    first.until_acked(6)  # so that all are on the disk; this answer is what is lost below
    big.kill()
    (path,) = big.segments(STREAM)
    flip(path, body_offset(path, 3) + 5000 if part == "body" else frame_offset(path, 3) + 50)
    big.start()
    assert big.inventory().corrupt
    again = Call(big)
    again.open(acked=2)
    again.send(*frames)
    again.until_acked(6)
    again.end()
    # It is said behind the acknowledgement, and not before it.
    eventually(lambda: [event["sequence"] for event in big.said("mended")] == [3], "the record is mended")
    big.check(0, 6)
    big.kill()
    big.start()
    big.check(0, 6)


def test_f13_flipped_header_length_is_refused_before_anything_is_allocated(big: Server) -> None:
    fill(big, 3)
    resting = big.peak_memory_bytes()
    (path,) = big.segments(STREAM)
    header, frame = frame_of(3)
    # On the wire, as it came: the checksum tells. With a checksum that fits: the bounds do.
    for bit in (12, 30, 40, 62):
        for offset in (56, 64):  # raw length, stored length
            flipped = bytearray(frame)
            flipped[offset + bit // 8] ^= 1 << bit % 8
            assert sent_and_refused(big, bytes(flipped))[0] is grpc.StatusCode.DATA_LOSS
        if 1 << bit > BODY_BYTES_MAX:
            huge = replace(header, raw_bytes=1 << bit, stored_bytes=1 << bit, shape=(1 << bit,))
            code, _ = sent_and_refused(big, encode_header(huge) + bytes(24))
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert big.peak_memory_bytes() - resting < 32 << 20
    # In a file.
    big.kill()
    overwrite(path, frame_offset(path, 1) + 64, struct.pack("<Q", 1 << 40))
    big.start()
    refused_from(big, 1)
    assert big.peak_memory_bytes() < resting + (32 << 20)


def test_f14_payload_flipped_on_read_is_data_loss_naming_the_record(big: Server) -> None:
    fill(big, 3)
    (path,) = big.segments(STREAM)
    flip(path, body_offset(path, 1) + SIZE // 2)  # under the running server, which has it in its index
    with pytest.raises(grpc.RpcError) as caught:
        for _ in big.stub.Read(log_pb2.ReadRequest(job=JOB, stream=STREAM), timeout=TIMEOUT_S):
            pass
    assert code_of(caught.value) is grpc.StatusCode.DATA_LOSS
    assert reason_of(caught.value) == "corrupt"
    assert "record 1 of s0.F step 1 microbatch 0 slot 0" in message_of(caught.value)
    refused_from(big, 1)


@pytest.mark.parametrize("last", [4, 2])
def test_f15_file_cut_on_a_record_boundary_is_noticed(big: Server, last: int) -> None:
    fill(big, 5)
    big.stop()
    (path,) = big.segments(STREAM)
    path.write_bytes(path.read_bytes()[: frame_offset(path, last)])
    big.start()
    refused_from(big, last)
    assert f"records {last} to 4 were durable and are gone" in big.inventory().reason


@pytest.mark.parametrize("sealed", [False, True], ids=["unsealed", "sealed"])
def test_f16_zeros_are_the_end_of_an_unsealed_segment_and_damage_in_a_sealed_one(
    big: Server, sealed: bool
) -> None:
    fill(big, 4)
    if sealed:
        big.stop()
    else:
        big.kill()
    (path,) = big.segments(STREAM)
    if sealed:
        begin = frame_offset(path, 3)
        overwrite(path, begin, bytes(path.stat().st_size - begin))
    else:
        with path.open("ab") as file:
            file.write(bytes(70_000))
    big.start()
    if sealed:
        refused_from(big, 3)
        return
    writer = big.writer()
    put(writer, 4)
    writer.close()
    big.check(0, 5)


def test_f17_stale_bytes_of_another_segment_are_told_by_its_id(big: Server) -> None:
    big.fence(1)
    writer = big.writer()
    for step in range(4):
        for stream in (STREAM, "s1.F"):
            put(writer, step, stream)
    writer.close()
    big.kill()
    (path,), (other,) = big.segments(STREAM), big.segments("s1.F")
    begin, end = frame_offset(other, 2), frame_offset(other, 3)
    assert begin == frame_offset(path, 2)
    stale = other.read_bytes()
    # Every checksum in it is right, and so are its sequence, key and digest: it is another stream's.
    overwrite(path, begin, stale[begin:end])
    big.start()
    refused_from(big, 2)
    big.check(0, 4, "s1.F")
    big.kill()
    path.write_bytes(stale)  # all of it
    big.start()
    refused_from(big, 0)


# -- frames -------------------------------------------------------------------------------------------------


def test_f18_shape_that_is_not_the_payloads_length_is_invalid(server: Server) -> None:
    header, frame = frame_of(0)
    body = frame[header.header_bytes :]
    for wrong in (
        replace(header, shape=(len(body) + 1,)),
        replace(header, shape=(len(body) // 2,)),
        replace(header, shape=()),
        replace(header, shape=(len(body), 2)),
        replace(header, dtype="float32"),
        replace(header, raw_bytes=len(body) - 1),
        replace(header, raw_bytes=len(body) - 1, shape=(len(body) - 1,)),
    ):
        assert sent_and_refused(server, forged(wrong, body)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "invalid",
        ), wrong


@pytest.mark.parametrize(
    "shape",
    [
        (1 << 32, 1 << 32),  # 2^64: nothing, if it wraps
        (1 << 62, 4, 1 << 10),
        (1 << 16,) * 4,
        (3, (1 << 64) - 8),  # 3 and -8
        ((1 << 64) - 1, (1 << 64) - 1),  # -1 and -1: one byte, if they are multiplied
        (0, (1 << 64) - 1),  # 0 and -1: nothing, whatever the arithmetic
    ],
)
@pytest.mark.parametrize("raw_bytes", [0, 1, 24])
def test_f19_shape_product_overflow_and_negative_dimensions_are_invalid(
    server: Server, shape: tuple[int, ...], raw_bytes: int
) -> None:
    header, _ = frame_of(0)
    wrong = replace(header, shape=shape, raw_bytes=raw_bytes, stored_bytes=raw_bytes)
    assert sent_and_refused(server, forged(wrong, bytes(raw_bytes)))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_f20_oversize_message_is_resource_exhausted(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "--body-bytes-max", "1000") as server:
        server.fence(1)
        call = Call(server)
        call.open()
        call.send(frame_of(0, body=bytes(1000))[1])
        call.until_acked(1)
        code, reason = sent_and_refused(server, frame_of(1, body=bytes(1001))[1])
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "oversize")
        # More than a message may have at all: gRPC stops it before it is in memory.
        resting = server.peak_memory_bytes()
        assert sent_and_refused(server, bytes(64 << 20))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert server.peak_memory_bytes() - resting < 32 << 20


# Reads record 0, and says what came of it and how much memory that took.
BOMB_READER = """
import json, sys
from pathlib import Path
from swift_ft.errors import SwiftError
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import RecordKey
from tests.faults.world import memory_bytes
import os

reader = LogReader([sys.argv[1]], "job")
reader.digests("s0.F", 0, cancelled=never)
before = memory_bytes(os.getpid(), "VmHWM")
cursor = reader.follow("s0.F", 0)
try:
    cursor.get(RecordKey(0, 0, 0), 20.0, lambda: False)
    said = "a record"
except SwiftError as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps([said, memory_bytes(os.getpid(), "VmHWM") - before]))
cursor.close()
reader.close()
"""


def test_f21_decompression_bomb_has_bounded_output_and_is_invalid(server: Server) -> None:
    size = 200 << 20
    packed = lz4.block.compress(bytes(size), store_size=False)
    header, _ = frame_of(0)
    bomb = replace(header, codec=CODEC_LZ4, stored_bytes=len(packed), digest=bytes(16))
    # It says how much it holds, and that is more than any lz4 block of its length can.
    much = replace(bomb, raw_bytes=256 * len(packed), shape=(256 * len(packed),))
    assert sent_and_refused(server, forged(much, packed))[0] is grpc.StatusCode.INVALID_ARGUMENT
    # It says that it holds little. The server, which unpacks nothing, cannot know; a reader finds out.
    little = replace(bomb, raw_bytes=1000, shape=(1000,))
    call = Call(server)
    call.open()
    call.send(forged(little, packed))
    call.until_acked(1)
    done = python("-c", BOMB_READER, server.address, timeout_s=60)
    assert done.returncode == 0, done.stderr
    said, used_bytes = json.loads(done.stdout)
    assert said.startswith("RecordCorrupt: step 0 microbatch 0 slot 0: its lz4 block does not decompress")
    assert used_bytes < 32 << 20 < size


COPIES = 96
"""Of the same bit patterns: 6 KiB and more, and every codec shrinks them."""


def specials(dtype: torch.dtype) -> list[torch.Tensor]:
    """Every kind of value that arithmetic or a comparison would not bring back, and every kind of shape.

    A codec shrinks the first two of them."""
    size = torch.empty((), dtype=dtype).element_size()
    patterns = torch.randint(0, 256, (64 * size,), dtype=torch.uint8)
    if dtype is torch.bool:
        patterns = patterns % 2
    anything = patterns.view(dtype)
    large = patterns.repeat(COPIES).view(dtype)
    found = [large, large.reshape(64, COPIES).t()]
    found += [anything, anything[0], anything[:0], anything[:0].reshape(0, 3), anything.reshape(4, 1, 16)]
    found.append(anything.reshape(8, 8).t())
    if dtype.is_floating_point and dtype not in (torch.float8_e8m0fnu,):
        values = [float("nan"), 0.0, -0.0, 1.0]
        if dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2):
            values += [float("inf"), float("-inf")]
        found.append(torch.tensor(values, dtype=torch.float64).to(dtype))
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_f22_every_tensor_comes_back_bit_for_bit(server: Server, codec: str) -> None:
    torch.manual_seed(0)
    tensors = [
        (name, index, tensor)
        for name in DTYPE_BY_NAME
        for index, tensor in enumerate(specials(getattr(torch, name)))
    ]
    keys = {(name, index): RecordKey(0, at, 0) for at, (name, index, _) in enumerate(tensors)}
    writer = server.writer(codec=codec)
    for name, index, tensor in tensors:
        writer.append(STREAM, keys[name, index], *owned_bytes(tensor))
    writer.close()
    server.kill()
    stored = {
        record.header.key: record.header for path in server.segments(STREAM) for record in scan(path).records
    }
    for name, index, tensor in tensors:
        header = stored[keys[name, index]]
        if index < 2:
            assert header.codec == CODECS[codec], (name, index)
            assert (header.stored_bytes < tensor.nbytes) == (codec != "none"), (name, index)
    server.start()
    with reading(server.address) as reader, following(reader, STREAM, 0) as cursor:
        for name, index, tensor in tensors:
            record = cursor.get(keys[name, index], TIMEOUT_S, lambda: False)
            back = to_tensor(record)
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), (name, index)
            assert bytes(owned_bytes(back)[2]) == bytes(owned_bytes(tensor)[2]), (name, index)
