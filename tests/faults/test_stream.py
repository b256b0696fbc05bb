"""Faults 1 to 10: what a writer may get wrong, and what may happen to it, against a real server process."""

import random
import threading
from pathlib import Path

import grpc
import pytest

from swift_ft._pb import log_pb2
from swift_ft.errors import RecordMissing, SwiftError
from swift_ft.log.frame import decode_header
from swift_ft.log.protocol import reason_of
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import RecordKey
from tests.faults.world import TIMEOUT_S, Helper, Server, body_of, key, put
from tests.integration.logserver_world import JOB
from tests.log_client import LogWriter
from tests.unit.log.append_call import Call
from tests.unit.log.clients import following, reading
from tests.unit.log.frames import STREAM, frame_of


def files(server: Server) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in server.segments(STREAM)}


def frames_read(server: Server) -> bytes:
    replies = server.stub.Read(log_pb2.ReadRequest(job=JOB, stream=STREAM), timeout=TIMEOUT_S)
    return b"".join(reply.frames for reply in replies)


def opened(server: Server, generation: int = 1) -> Call:
    call = Call(server)
    call.open(generation=generation)
    return call


def refused_to_open(server: Server, generation: int = 1) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        Call(server).open(generation=generation)
    return reason_of(caught.value)


def test_f01_duplicate_record_same_digest_is_acked_and_not_written(server: Server) -> None:
    call = opened(server)
    credit = call.credit + len(frame_of(0)[1]) + len(frame_of(1)[1])
    call.send(frame_of(0)[1], frame_of(1)[1])
    call.until_acked(2)
    call.read(lambda: call.credit == credit)  # it may come in a message behind the acknowledgement's
    before = files(server)
    call.acked.clear()
    call.send(frame_of(0)[1])
    call.until_acked(2)  # where the stream is, not where the duplicate was
    call.read(lambda: call.credit == credit + len(frame_of(0)[1]))
    call.end()
    assert files(server) == before
    assert frames_read(server) == frame_of(0)[1] + frame_of(1)[1]


def test_f02_duplicate_record_other_digest_quarantines_the_stream(server: Server) -> None:
    call = opened(server)
    call.send(frame_of(0)[1])
    call.until_acked(1)
    call.send(frame_of(0, body=b"other")[1])
    code, reason, message = call.refused()
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "conflict")
    assert "step 0 microbatch 0 slot 0" in message
    server.stop()
    server.start()  # it is not forgotten
    assert refused_to_open(server) == "conflict"
    found = server.inventory()
    assert found.corrupt
    assert found.records == 1
    server.stub.Reset(log_pb2.ResetRequest(job=JOB, generation=1))
    opened(server).end()


def test_f03_sequence_gap_is_refused_and_the_expected_one_named(server: Server) -> None:
    call = opened(server)
    call.send(frame_of(0)[1])
    call.until_acked(1)
    call.send(frame_of(2)[1])
    code, reason, message = call.refused()
    assert (code, reason) == (grpc.StatusCode.OUT_OF_RANGE, "sequence-gap")
    assert "1 is expected" in message
    assert frames_read(server) == frame_of(0)[1]
    assert opened(server).opened == {STREAM: 1}


def test_f04_microbatches_out_of_order_are_accepted_and_found_by_key(server: Server) -> None:
    writer = server.writer()
    order = [(step, microbatch) for step in range(3) for microbatch in (3, 1, 0, 2)]
    for step, microbatch in order:
        writer.append(STREAM, RecordKey(step, microbatch, 0), "uint8", (2,), bytes((step, microbatch)))
    writer.close()
    with reading(server.address) as reader:
        assert list(reader.digests(STREAM, 0, cancelled=never)) == [RecordKey(*at, 0) for at in order]
        with following(reader, STREAM, 0) as cursor:
            for step, microbatch in sorted(order):
                record = cursor.get(RecordKey(step, microbatch, 0), TIMEOUT_S, lambda: False)
                assert record.body == bytes((step, microbatch))
                assert record.sequence == order.index((step, microbatch))


def test_f05_same_key_under_two_sequences_is_rejected(server: Server) -> None:
    call = opened(server)
    call.send(frame_of(0, step=4)[1])
    call.until_acked(1)
    call.send(frame_of(1, step=4, body=b"x")[1])
    assert call.refused()[:2] == (grpc.StatusCode.ALREADY_EXISTS, "conflict")
    server.kill()
    server.start()  # the index that knows it is read from the files
    call = opened(server)
    call.send(frame_of(1, step=4)[1])
    assert call.refused()[:2] == (grpc.StatusCode.ALREADY_EXISTS, "conflict")
    assert server.inventory().records == 1


def test_f06_stale_generation_is_refused_and_nothing_written(server: Server) -> None:
    call = opened(server)
    call.send(frame_of(0)[1])
    call.until_acked(1)
    server.fence(2)
    assert call.refused()[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "stale-generation")
    before = files(server)
    assert refused_to_open(server) == "stale-generation"
    heir = opened(server, generation=2)
    heir.send(frame_of(1, generation=1)[1])  # what the dead one had framed
    assert heir.refused()[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "invalid")
    assert files(server) == before
    server.kill()
    server.start()  # the fence is durable
    assert refused_to_open(server) == "stale-generation"
    assert frames_read(server) == frame_of(0)[1]


def test_f07_future_generation_is_refused_until_it_is_granted(server: Server) -> None:
    assert refused_to_open(server, generation=2) == "generation-not-granted"
    writer = server.writer(generation=2)  # a client tries again by itself
    put(writer, 0)
    with pytest.raises(SwiftError):
        writer.flush(0.3)
    server.fence(2)
    writer.close(TIMEOUT_S)
    server.check(0, 1)


def test_f08_retry_older_than_any_window_is_answered_from_the_durable_index(server: Server) -> None:
    count = 3000
    writer = server.writer()
    for step in range(count):
        put(writer, step, size=200)
    writer.close()
    server.kill()
    server.start()
    assert len(server.segments(STREAM)) > 1
    before = files(server)
    frames = frames_read(server)
    first = frames[: decode_header(frames).frame_bytes]
    call = opened(server)
    assert call.opened == {STREAM: count}
    call.send(first)
    call.until_acked(count)
    assert files(server) == before
    call.send(frame_of(0, body=b"other")[1])
    assert call.refused()[:2] == (grpc.StatusCode.ALREADY_EXISTS, "conflict")


# Writes microbatches of one step, and says which of them are durable.
MORTAL = """
import sys
from swift_ft.log.record import RecordKey
from tests.log_client import LogWriter

writer = LogWriter([sys.argv[1]], "job", 1)
for microbatch, line in enumerate(sys.stdin):
    writer.append("s0.F", RecordKey(0, microbatch, 0), "uint8", (1,), bytes((microbatch,)))
    writer.flush(20.0)
    print(microbatch, flush=True)
"""


def test_f09_client_dies_mid_stream_its_prefix_is_kept_and_the_step_known_to_be_incomplete(
    server: Server,
) -> None:
    with Helper(MORTAL, server.address) as client:
        for microbatch in range(3):
            client.say("go")
            assert client.hear() == microbatch
        client.process.kill()
    with reading(server.address) as reader:
        assert list(reader.digests(STREAM, 0, cancelled=never)) == [
            RecordKey(0, microbatch, 0) for microbatch in range(3)
        ]
        cursor = reader.follow(STREAM, 0)
        for microbatch in range(3):
            assert cursor.get(RecordKey(0, microbatch, 0), TIMEOUT_S, lambda: False).body[0] == microbatch
        # The fourth microbatch of this step: neither made up, nor the end of the log.
        with pytest.raises(RecordMissing, match="step 0 microbatch 3"):
            cursor.get(RecordKey(0, 3, 0), 0.5, lambda: False)
        # Whoever replays the dead rank compares the three and writes the rest.
        server.fence(2)
        heir = server.writer(generation=2)
        heir.expect(STREAM, reader.digests(STREAM, 0, cancelled=never))
        for microbatch in range(4):
            heir.append(STREAM, RecordKey(0, microbatch, 0), "uint8", (1,), bytes((microbatch,)))
        heir.close()
        assert heir.stats.verified == 3
        assert cursor.get(RecordKey(0, 3, 0), TIMEOUT_S, lambda: False).generation == 2
        cursor.close()
    assert server.inventory().records == 4


def test_f10_server_restarts_and_clients_resend_without_duplicates_or_gaps(tmp_path: Path) -> None:
    """SIGKILL at random moments, same port and directory: nothing is lost, nothing is doubled."""
    streams = ("s0.F", "s0.B", "s1.F")
    count = 240
    with Server(tmp_path / "log", "--segment-bytes", "500000") as server:
        server.fence(1)
        writers = [server.writer(records_max=25) for _ in streams]
        reader = LogReader([server.address], JOB)
        cursors = [reader.follow(stream, 0) for stream in streams]
        failures: list[SwiftError] = []

        def write(writer: LogWriter, stream: str) -> None:
            try:
                for step in range(count):
                    put(writer, step, stream)
                writer.flush(TIMEOUT_S * 2)
            except SwiftError as error:
                failures.append(error)

        threads = [
            threading.Thread(target=write, args=(writer, stream)) for writer, stream in zip(writers, streams)
        ]
        for thread in threads:
            thread.start()
        draw = random.Random(7)
        consumed = 0
        for _ in range(4):
            # Go on for a while, as the tail of one stream tells; then kill in the middle of it.
            for _ in range(draw.randint(10, 40)):
                record = cursors[0].get(key(consumed), TIMEOUT_S * 2, lambda: False)
                assert record.body == body_of(consumed)
                consumed += 1
            server.kill()
            server.start()
        for thread in threads:
            thread.join(TIMEOUT_S * 3)
        assert not failures, failures
        for cursor, begin in zip(cursors, (consumed, 0, 0)):
            for step in range(begin, count):
                assert cursor.get(key(step), TIMEOUT_S, lambda: False).body == body_of(step)
            assert cursor._held_bytes == 0  # nothing came twice
            cursor.close()
        assert sum(writer.stats.resent for writer in writers) > 0
        for writer in writers:
            writer.close()
        reader.close()
        for stream in streams:
            server.check(0, count, stream)
