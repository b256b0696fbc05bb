"""One Append call, message by message, as a client in another language would make it."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft._pb import log_pb2
from swift_ft.log.protocol import SERVICE, Fsync, code_of
from swift_ft.log.record import RecordKey
from swift_ft_services.logserver.engine import Outgoing
from swift_ft_services.logserver.state import EngineConfig
from tests.log_client import LogWriter
from tests.unit.log.append_call import Call
from tests.unit.log.frames import STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess, eventually

TIMEOUT_S = 10.0


@pytest.fixture
def server() -> Iterator[InProcess]:
    with InProcess() as running:
        yield running


def stored(server: InProcess, stream: str = STREAM) -> list[int]:
    assert isinstance(server.storage, MemoryStorage)
    return sorted(server.storage.frames.get((JOB, stream), {}))


def test_open_append_acknowledge(server: InProcess) -> None:
    call = Call(server)
    call.open(STREAM, "s1.F")
    assert call.welcome is not None
    assert call.welcome.body_bytes_max == server.engine.config.body_bytes_max
    granted = call.credit
    assert granted == server.engine.config.credit_bytes
    frames = [frame_of(0)[1], frame_of(0, stream="s1.F")[1], frame_of(1)[1]]
    call.send(*frames)
    call.until_acked(2)
    call.until_acked(1, "s1.F")
    call.read(lambda: call.credit == granted + sum(map(len, frames)))  # all credit comes back
    call.end()
    assert (stored(server), stored(server, "s1.F")) == ([0, 1], [0])
    again = Call(server)
    again.open()
    assert again.opened == {STREAM: 2}


def test_frames_of_a_stream_that_is_not_open(server: InProcess) -> None:
    call = Call(server)
    call.open()
    call.send(frame_of(0, stream="s1.F")[1])
    assert call.refused()[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "stream-not-open")


def test_the_newest_call_that_opens_a_stream_has_it(server: InProcess) -> None:
    old, new = Call(server), Call(server)
    old.open()
    new.open()
    old.send(frame_of(0)[1])
    assert old.refused()[1] == "stream-not-open"
    new.send(frame_of(0)[1])
    new.until_acked(1)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda frame: frame[:-1], grpc.StatusCode.INVALID_ARGUMENT),
        (lambda frame: frame[:100], grpc.StatusCode.INVALID_ARGUMENT),
        (lambda frame: frame[:-1] + b"\0", grpc.StatusCode.DATA_LOSS),
        (lambda frame: frame[:50] + b"\xff" + frame[51:], grpc.StatusCode.DATA_LOSS),
        (lambda frame: b"\0" * 200, grpc.StatusCode.DATA_LOSS),
        (lambda frame: frame[:4] + b"\x02" + frame[5:], grpc.StatusCode.INVALID_ARGUMENT),  # fault 42
    ],
)
def test_damaged_frames_are_refused(
    server: InProcess, damage: Callable[[bytes], bytes], code: grpc.StatusCode
) -> None:
    call = Call(server)
    call.open()
    call.send(damage(frame_of(0)[1]))
    call.raw_end()
    assert call.refused()[0] is code
    assert stored(server) == []


def test_a_frame_may_come_in_several_messages(server: InProcess) -> None:
    call = Call(server)
    call.open()
    frames = b"".join(frame_of(sequence)[1] for sequence in range(3))
    header = frame_of(0)[0].header_bytes
    one = len(frames) // 3
    cuts = [0, header, header + 1, one, one + header + 5, 2 * one + header + 7, len(frames)]
    for begin, end in pairwise(cuts):
        call.send(frames[begin:end])
    call.until_acked(3)
    assert stored(server) == [0, 1, 2]
    call.end()


def test_a_flip_in_any_message_of_a_frame_is_found(server: InProcess) -> None:
    header, frame = frame_of(0)
    for at in (header.header_bytes, header.header_bytes + 10, len(frame) - 1):
        call = Call(server)
        call.open()
        changed = bytearray(frame)
        changed[at] ^= 1
        for begin, end in pairwise((0, header.header_bytes, header.header_bytes + 9, len(frame))):
            call.send(bytes(changed[begin:end]))
        assert call.refused()[0] is grpc.StatusCode.DATA_LOSS
    assert stored(server) == []


def test_a_message_that_is_no_message(server: InProcess) -> None:
    call = Call(server)
    call.raw(b"\x0a\xff\xff\xff\xff\xff")
    assert call.refused()[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_bad_name_is_refused(server: InProcess) -> None:
    call = Call(server)
    with pytest.raises(grpc.RpcError, match="is not allowed"):
        call.open("../x")
    for work in (
        lambda: server.stub.Fence(log_pb2.FenceRequest(job="a/b", generation=1)),
        lambda: server.stub.Trim(log_pb2.TrimRequest(job="", below_step=1)),
        lambda: server.stub.Inventory(log_pb2.InventoryRequest(job="a\0")),
        lambda: server.stub.Reset(log_pb2.ResetRequest(job=".x", generation=1)),
        lambda: list(server.stub.Read(log_pb2.ReadRequest(job="j", stream="/x"))),
        lambda: list(server.stub.Digests(log_pb2.DigestsRequest(job="j", stream=".."))),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            work()
        assert code_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT


def test_credit_that_is_overdrawn_is_refused() -> None:
    with InProcess(config=EngineConfig(credit_bytes=400, body_bytes_max=100)) as server:
        call = Call(server)
        call.open()
        for sequence in range(20):
            call.send(frame_of(sequence)[1])
            call.until_acked(sequence + 1)
        call = Call(server)
        call.open()
        # Frames of one message are taken together: more than the credit and one frame under way.
        call.send(*[frame_of(sequence)[1] for sequence in range(20, 40)])
        assert call.refused()[1] == "invalid"


def test_replies_that_go_out_together_give_all_their_credit() -> None:
    outgoing = Outgoing()
    outgoing.put(
        log_pb2.AppendReply(credit_bytes=100, acked=[log_pb2.Acked(stream="s0.F", durable_sequence=1)])
    )
    outgoing.put(
        log_pb2.AppendReply(credit_bytes=7, acked=[log_pb2.Acked(stream="s0.B", durable_sequence=2)])
    )
    outgoing.put(log_pb2.AppendReply(acked=[log_pb2.Acked(stream="s0.F", durable_sequence=3)]))
    outgoing.put(None)
    (reply,) = outgoing.replies()
    assert reply.credit_bytes == 107
    assert [(acked.stream, acked.durable_sequence) for acked in reply.acked] == [
        ("s0.F", 3),
        ("s0.B", 2),
    ]


def test_no_credit_is_lost_however_replies_come() -> None:
    with InProcess(config=EngineConfig(credit_bytes=1 << 16)) as running:
        writer = LogWriter([running.address], JOB, 1)
        try:
            for step in range(2000):  # 16 times the credit, in records that are acknowledged by the handful
                writer.append(STREAM, RecordKey(step, 0, 0), "uint8", (500,), bytes(500))
            writer.flush(30.0)
            (link,) = writer.sending.links.values()
            eventually(lambda: link.core._credit == 1 << 16)
        finally:
            writer.close(0.0)


def test_fault_23_a_full_disk_refuses_appends_and_goes_on_after_a_trim() -> None:
    storage = MemoryStorage(space=3 * len(frame_of(0)[1]))
    with InProcess(storage) as server:
        health = health_pb2_grpc.HealthStub(server.channel)

        def serving() -> bool:
            replies = [health.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICE)]
            assert replies[0].status == replies[1].status
            return bool(replies[0].status == health_pb2.HealthCheckResponse.SERVING)

        assert serving()
        call = Call(server)
        call.open()
        for sequence in range(3):
            call.send(frame_of(sequence)[1])
        call.until_acked(3)
        call.send(frame_of(3)[1])
        assert call.refused()[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "disk-full")
        assert not serving()
        # Reads still work.
        frames = b"".join(
            reply.frames for reply in server.stub.Read(log_pb2.ReadRequest(job=JOB, stream=STREAM))
        )
        assert frames == b"".join(frame_of(sequence)[1] for sequence in range(3))
        # So do fences and trims; then there is space again.
        server.engine.administration.fence(JOB, 2)
        assert server.stub.Trim(log_pb2.TrimRequest(job=JOB, below_step=2)).trimmed_below_step == 2
        eventually(lambda: storage.space > 0)
        again = Call(server)
        again.open(generation=2)
        assert again.opened == {STREAM: 3}
        again.send(frame_of(3, generation=2)[1])
        again.until_acked(4)
        assert serving()


@pytest.mark.parametrize("policy", list(Fsync))
def test_a_fence_waits_for_what_was_accepted(policy: Fsync) -> None:
    storage = MemoryStorage()
    with InProcess(storage, EngineConfig(fsync=policy, fsync_interval_s=0.05)) as server:
        call = Call(server)
        call.open()
        call.send(*[frame_of(sequence)[1] for sequence in range(50)])
        call.until_acked(1)
        server.engine.administration.fence(JOB, 2)
        count = len(stored(server))
        assert storage.unsynced == 0 or policy is Fsync.NEVER
        digests = [
            record
            for reply in server.stub.Digests(log_pb2.DigestsRequest(job=JOB, stream=STREAM))
            for record in reply.records
        ]
        assert len(digests) == count
        assert storage.metas[JOB].generation == 2
        assert storage.metas[JOB].streams[STREAM].next_at_least == count


@pytest.mark.parametrize("default", list(Fsync))
@pytest.mark.parametrize("said", [*Fsync, ""])
def test_a_stream_says_when_its_records_are_acknowledged(default: Fsync, said: str) -> None:
    storage = MemoryStorage()
    with InProcess(storage, EngineConfig(fsync=default, fsync_interval_s=0.05)) as server:
        call = Call(server)
        opens = [log_pb2.Open(job=JOB, stream=STREAM, generation=1, fsync=said)]
        call.raw(log_pb2.AppendRequest(opens=opens).SerializeToString())
        call.send(frame_of(0)[1])
        call.until_acked(1)
        policy = Fsync(said or default)
        assert storage.commits[0] == (1, policy is Fsync.ALWAYS)
        if policy is Fsync.INTERVAL:
            eventually(lambda: not storage.unsynced)
        server.engine.administration.fence(JOB, 2)
        assert storage.unsynced == (1 if policy is Fsync.NEVER else 0), "a fence syncs what was promised"


def test_a_writers_policy_comes_before_the_servers() -> None:
    storage = MemoryStorage()
    with InProcess(storage, EngineConfig(fsync=Fsync.NEVER)) as server:
        writer = LogWriter([server.address], JOB, 1, fsync="always")
        writer.append("s0.F", RecordKey(0, 0, 0), "uint8", (3,), b"abc")
        writer.flush(TIMEOUT_S)
        writer.close()
        assert storage.commits == [(1, True)]


def test_a_policy_that_is_not_known(server: InProcess) -> None:
    call = Call(server)
    opens = [log_pb2.Open(job=JOB, stream=STREAM, generation=1, fsync="sometimes")]
    call.raw(log_pb2.AppendRequest(opens=opens).SerializeToString())
    code, _, message = call.refused()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "always, interval, never" in message


def test_fence_refuses_an_older_generation_and_zero(server: InProcess) -> None:
    server.stub.Fence(log_pb2.FenceRequest(job=JOB, generation=5))
    server.stub.Fence(log_pb2.FenceRequest(job=JOB, generation=5))
    with pytest.raises(grpc.RpcError, match="older than the granted 5"):
        server.stub.Fence(log_pb2.FenceRequest(job=JOB, generation=4))
    with pytest.raises(grpc.RpcError, match="start at 1"):
        server.stub.Fence(log_pb2.FenceRequest(job="new", generation=0))


def test_a_drained_server_has_acknowledged_everything() -> None:
    server = InProcess()
    with server:
        call = Call(server)
        call.open()
        call.send(*[frame_of(sequence)[1] for sequence in range(20)])
        call.until_acked(1)
        server.engine.drain()
        assert call.refused()[1] == "draining"
    assert call.acked[STREAM] == len(stored(server))
    assert isinstance(server.storage, MemoryStorage)
    assert server.storage.closed
