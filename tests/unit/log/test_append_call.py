"""One Append call, message by message, as a client in another language would make it."""

from collections.abc import Callable

import grpc
import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.frame import Assembler
from swift_ft.log.protocol import Fsync, Reason
from swift_ft.log.record import RecordKey
from swift_ft_services.logserver.append_session import Appends
from swift_ft_services.logserver.engine import Outgoing
from swift_ft_services.logserver.state import AppendCall, EngineConfig
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.append_call import Call, Replies, refusing
from tests.unit.log.frames import STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess

TIMEOUT_S = 10.0


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


def test_no_frame_is_begun_before_a_stream_is_open() -> None:
    session = AppendCall(Replies(), Assembler(1 << 20))
    with refusing(Reason.NOT_OPEN):
        Appends.parse(session, memoryview(frame_of(0)[1])[:-1])


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


def test_a_message_that_is_no_message(server: InProcess) -> None:
    call = Call(server)
    call.raw(b"\x0a\xff\xff\xff\xff\xff")
    assert call.refused()[0] is grpc.StatusCode.INVALID_ARGUMENT


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
        call.ask(fsync=said)
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
    call.ask(fsync="sometimes")
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
