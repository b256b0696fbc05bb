"""Numbers that no training run has, in every field that takes one: they cost whoever sends them, and nobody else."""

import random
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from swift_ft._pb import log_pb2
from swift_ft.log import admin
from swift_ft.log.protocol import Reason, code_of
from swift_ft_services.logserver.core import HOLES_MAX, NUMBER_MAX, LogCore, Refused
from tests.descriptors import is_repeated
from tests.hostile.world import BOUND_S, STREAM, Neighbour, Server, frame, message, opening
from tests.unit.log.frames import JOB, frame_of

FAR = [
    1 << 31,
    (1 << 32) - 1,
    NUMBER_MAX - 1,
    NUMBER_MAX,
    NUMBER_MAX + 1,
    1 << 61,
    (1 << 63) - 1,
    (1 << 64) - 1,
]
NUMBERS = [0, 1, 1, 1, 2, *FAR]
C = grpc.StatusCode
REFUSED = {
    C.INVALID_ARGUMENT,
    C.FAILED_PRECONDITION,
    C.OUT_OF_RANGE,
    C.ALREADY_EXISTS,
    C.DATA_LOSS,
    C.NOT_FOUND,
    C.RESOURCE_EXHAUSTED,
}


@pytest.mark.parametrize("acked", [NUMBER_MAX - 5, 1 << 61, (1 << 62) + 1, (1 << 64) - 1])
def test_a_claim_that_is_far_ahead_holds_nobody_up(tmp_path: Path, acked: int) -> None:
    """Record 0, then one behind a gap that nothing ever stood in; a trim covers the gap, and a reader passes it."""
    neighbour = Neighbour()
    with Server(tmp_path / "log") as server:
        admin.fence(server.address, "job", 1, BOUND_S)
        server.put([opening("job"), message(frame("job", 0, 5))], 1)
        claim = [opening("job", acked=acked), message(frame("job", acked, 0))]
        if acked <= NUMBER_MAX:
            server.put(claim, acked + 1)
        else:
            with pytest.raises(grpc.RpcError, match="none is above"):
                list(server.append(claim))
        admin.trim(server.address, "job", 1, BOUND_S)
        replies = server.stub.Read(
            log_pb2.ReadRequest(job="job", stream=STREAM, from_step=1), timeout=BOUND_S
        )
        assert b"".join(reply.frames for reply in replies) == frame("job", 0, 5)
        neighbour.use(server.address)
    with Server(tmp_path / "log") as server:
        replies = server.stub.Read(
            log_pb2.ReadRequest(job="job", stream=STREAM, from_step=1), timeout=BOUND_S
        )
        assert b"".join(reply.frames for reply in replies) == frame("job", 0, 5)
        neighbour.use(server.address)


def test_claims_that_follow_each_other_are_one_gap_and_gaps_are_bounded(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server:
        admin.fence(server.address, "job", 1, BOUND_S)
        for acked in range(2, 12, 2):
            list(server.append([opening("job", acked=acked)]))
        (found,) = admin.inventory(server.address, "job", BOUND_S)
        assert list(found.holes) == ["records 0 to 9 were acknowledged and are gone"]


def test_gaps_that_writers_claim_are_bounded() -> None:
    core = LogCore()
    core.fence(JOB, 1)
    for at in range(HOLES_MAX):
        stream = core.open(JOB, STREAM, 1, 2 * at + 1)
        core.append(stream, 1, frame_of(2 * at + 1)[0])
        core.made_durable(stream, 2 * at + 2)
    with pytest.raises(Refused) as refused:
        core.open(JOB, STREAM, 1, 2 * HOLES_MAX + 1)
    assert refused.value.refusal.reason == Reason.LIMIT
    core.reset(core.job(JOB))
    core.open(JOB, STREAM, 1, 1 << 20)


class Answered(AbstractContextManager[None]):
    """A call may be refused, in words that there are."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, grpc.RpcError):
            return False
        assert code_of(error) in REFUSED, (self.method, str(error)[:500])
        return True


def filled(draw: random.Random, descriptor: Descriptor) -> Message:
    """Numbers from anywhere in every field that takes one; a job and a stream that are there."""
    made = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if is_repeated(field):
                getattr(made, field.name).append(filled(draw, field.message_type))
            elif draw.random() < 0.5:
                getattr(made, field.name).CopyFrom(filled(draw, field.message_type))
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.name in ("job", "stream"):
                setattr(made, field.name, "job" if field.name == "job" else STREAM)
        elif field.type == FieldDescriptor.TYPE_BOOL:
            setattr(made, field.name, draw.random() < 0.5 and field.name != "follow")
        elif field.type == FieldDescriptor.TYPE_BYTES:
            setattr(made, field.name, b"")
        else:
            bits = 32 if field.type == FieldDescriptor.TYPE_UINT32 else 64
            setattr(made, field.name, draw.choice([number for number in NUMBERS if number < 1 << bits]))
    return made


def attack(server: Server, draw: random.Random) -> None:
    """One call, of whatever kind; its answer is one of those that there are."""
    method = draw.choice(log_pb2.DESCRIPTOR.services_by_name["Log"].methods)
    request = filled(draw, method.input_type)
    with Answered(method.name):
        if method.name == "Append":
            assert isinstance(request, log_pb2.AppendRequest)
            request.opens[0].generation = draw.choice([1, 1, 1, draw.choice(NUMBERS)])
            small = draw.choice([0, 1, 2, *NUMBERS])
            hostile = frame(
                "job",
                draw.choice([request.opens[0].acked_sequence, small]),
                draw.choice(NUMBERS),
                generation=draw.choice([1, 1, draw.choice(NUMBERS)]),
                microbatch=draw.choice([0, 1, (1 << 31), (1 << 32) - 1]),
                slot=draw.choice([0, 1, (1 << 31), (1 << 32) - 1]),
            )
            list(server.append([request.SerializeToString(), message(hostile)]))
            return
        call = getattr(server.stub, method.name)(request, timeout=BOUND_S)
        if method.server_streaming:
            list(call)


@pytest.mark.parametrize("seed", range(3))
def test_no_number_in_any_field_holds_others_up(tmp_path: Path, seed: int) -> None:
    draw, neighbour = random.Random(seed), Neighbour()
    for _life in range(2):
        with Server(tmp_path / "log") as server:
            neighbour.use(server.address)  # what the calls of the last life have left is there
            for _ in range(5):
                generation = server.engine.state.core.generation_of("job")
                if generation not in (0, 1):
                    server.stub.Drop(log_pb2.DropRequest(job="job", force=True), timeout=BOUND_S)
                admin.fence(server.address, "job", 1, BOUND_S)
                for _call in range(60):
                    attack(server, draw)
                neighbour.use(server.address)
