"""Faults 40 to 42: names that lead elsewhere, and bytes of other versions, against a real server process."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from swift_ft._pb import coordinator_pb2, coordinator_pb2_grpc, log_pb2
from swift_ft.errors import RecordCorrupt
from swift_ft.log.protocol import code_of, reason_of
from tests.faults.world import (
    FAILED,
    TIMEOUT_S,
    Server,
    body_of,
    fill,
    frame_offset,
    key,
    overwrite,
    put,
)
from tests.integration.coordinator_world import Coordinator
from tests.integration.logserver_world import JOB
from tests.unit.log.append_call import Call
from tests.unit.log.clients import following, reading
from tests.unit.log.frames import STREAM, frame_of

BAD_NAMES = (
    "../x",
    "..",
    ".",
    "",
    "/etc",
    "a/b",
    "a\0b",
    "a\n",
    ".hidden",
    "-flag",
    "x" * 65,
    "ä",
    "a\\b",
    "a b",
)

LOG_CALLS: dict[str, Callable[[Server, str], object]] = {
    "fence": lambda server, name: server.stub.Fence(log_pb2.FenceRequest(job=name, generation=1)),
    "trim": lambda server, name: server.stub.Trim(log_pb2.TrimRequest(job=name, below_step=1)),
    "reset": lambda server, name: server.stub.Reset(log_pb2.ResetRequest(job=name, generation=1)),
    "inventory": lambda server, name: server.stub.Inventory(log_pb2.InventoryRequest(job=name)),
    "read a job": lambda server, name: list(
        server.stub.Read(log_pb2.ReadRequest(job=name, stream=STREAM), timeout=TIMEOUT_S)
    ),
    "read a stream": lambda server, name: list(
        server.stub.Read(log_pb2.ReadRequest(job=JOB, stream=name), timeout=TIMEOUT_S)
    ),
    "digests": lambda server, name: list(
        server.stub.Digests(log_pb2.DigestsRequest(job=JOB, stream=name), timeout=TIMEOUT_S)
    ),
    "append": lambda server, name: Call(server).open(name),
}


def tree(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


@pytest.mark.parametrize("call", LOG_CALLS)
def test_f40_names_outside_the_grammar_are_refused_by_the_log_server(
    server: Server, tmp_path: Path, call: str
) -> None:
    before = tree(tmp_path)
    for name in BAD_NAMES:
        with pytest.raises(grpc.RpcError) as caught:
            LOG_CALLS[call](server, name)
        assert code_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT, name
        assert reason_of(caught.value) == "invalid", name
    assert tree(tmp_path) - before <= {path for path in tree(tmp_path) if "events" in str(path)}


def test_f40_names_outside_the_grammar_are_refused_by_the_coordinator(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path / "meta").start()
    try:
        with grpc.insecure_channel(coordinator.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            for name in BAD_NAMES:
                member = coordinator_pb2.Member(rank=0, incarnation="i")
                for call in (
                    lambda name=name: stub.Status(coordinator_pb2.StatusRequest(job=name), timeout=TIMEOUT_S),
                    lambda name=name, member=member: stub.Join(
                        coordinator_pb2.JoinRequest(job=name, member=member, world_size=1), timeout=TIMEOUT_S
                    ),
                    lambda name=name: next(
                        stub.Watch(coordinator_pb2.WatchRequest(job=name), timeout=TIMEOUT_S)
                    ),
                ):
                    with pytest.raises(grpc.RpcError) as caught:
                        call()
                    assert code_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT, name
            # A rank is a number, and has bounds.
            for rank in (-1, 1, 1 << 30):
                member = coordinator_pb2.Member(rank=rank, incarnation="i")
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Join(
                        coordinator_pb2.JoinRequest(job="a", member=member, world_size=1), timeout=TIMEOUT_S
                    )
                assert code_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT, rank
    finally:
        assert coordinator.stop() == 0


def test_f40_symbolic_links_are_not_followed(server: Server, tmp_path: Path) -> None:
    """Somebody who can write into the directory has put one where a job or a stream is going to be."""
    server.may_say = FAILED
    outside = tmp_path / "outside"
    outside.mkdir()
    (server.directory / "linked").symlink_to(outside)
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.Fence(log_pb2.FenceRequest(job="linked", generation=1), timeout=TIMEOUT_S)
    assert (code_of(caught.value), reason_of(caught.value)) == (grpc.StatusCode.DATA_LOSS, "job-set-apart")
    (server.directory / JOB / "s9.F").symlink_to(outside)
    call = Call(server)
    call.open("s9.F")
    call.send(frame_of(0, stream="s9.F")[1])
    assert call.refused()[:2] == (grpc.StatusCode.DATA_LOSS, "job-set-apart")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("version", [0, 2, 255])
def test_f42_unknown_record_version_is_refused_on_the_wire(server: Server, version: int) -> None:
    frame = bytearray(frame_of(0)[1])
    frame[4:6] = version.to_bytes(2, "little")
    call = Call(server)
    call.open()
    call.send(bytes(frame))
    assert call.refused()[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "invalid")
    assert server.inventory().records == 0


@pytest.mark.parametrize("what", ["record", "segment"])
def test_f42_unknown_version_in_a_file_is_refused(tmp_path: Path, what: str) -> None:
    with Server(tmp_path / "log") as server:
        fill(server, 3)
        server.kill()
        (path,) = server.segments(STREAM)
        unknown = 2 if what == "record" else 3
        at = frame_offset(path, 1) if what == "record" else 0
        overwrite(path, 4 + at, unknown.to_bytes(2, "little"))
        server.start()
        assert f"version {unknown} is not known" in server.inventory().reason
        with reading(server.address) as reader, following(reader, STREAM, 0) as cursor:
            if what == "record":
                assert cursor.get(key(0), TIMEOUT_S, lambda: False).body == body_of(0)
            with pytest.raises(RecordCorrupt, match=f"version {unknown} is not known"):
                cursor.get(key(1), TIMEOUT_S, lambda: False)


def test_f42_unknown_proto_fields_are_tolerated(server: Server) -> None:
    """What a newer client says besides is passed over, in every message it sends."""
    writer = server.writer()
    put(writer, 0)
    writer.close()
    newer = b"\xfa\x07\x03abc" + b"\xf0\x07\x01"  # fields 127 and 126: bytes and a number
    call = server.channel.unary_unary("/swift.log.v1.Log/Inventory", None, log_pb2.InventoryReply.FromString)
    reply = call(log_pb2.InventoryRequest(job=JOB).SerializeToString() + newer, timeout=TIMEOUT_S)
    assert [stream.records for stream in reply.streams] == [1]
    append = Call(server)
    opening = log_pb2.Open(job=JOB, stream=STREAM, generation=1).SerializeToString() + newer
    inside = b"\x0a" + bytes((len(opening),)) + opening  # field 1, opens
    append.raw(inside + newer)
    append.read(lambda: append.opened == {STREAM: 1})
    frame = frame_of(1)[1]
    append.raw(log_pb2.AppendRequest(frames=frame).SerializeToString() + newer)
    append.until_acked(2)
    assert server.inventory().records == 2
