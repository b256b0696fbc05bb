"""Health checks and half-open calls, by clients that no library makes: nobody else waits for them, nor does SIGTERM."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft._pb import log_pb2
from swift_ft.log.protocol import CALLS_PER_CONNECTION, SERVICE, code_of
from swift_ft.tokens import LOG
from swift_ft_services.health import REQUEST_BYTES_MAX
from tests.health_probe import check_service
from tests.hostile.clients import Connection
from tests.hostile.world import BOUND_S, Neighbour, Server
from tests.integration.logserver_world import LogServer

HEALTH = "/grpc.health.v1.Health/"
NAMED = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LogServer]:
    """A process of its own, so that it can be stopped as an operator does."""
    with LogServer(tmp_path / "log") as server:
        yield server


@pytest.mark.parametrize(
    "method",
    [
        HEALTH + "Check",
        LOG + "Fence",
        pytest.param(LOG + "Inventory", marks=pytest.mark.matrix),
    ],
)
def test_calls_whose_requests_never_come_take_no_threads_that_others_need(
    server: LogServer, method: str
) -> None:
    """More of them than there are places: of other kinds of calls none is held up, of the same kind none for long."""
    neighbour = Neighbour()
    with ExitStack() as stack:
        for _ in range(300 // CALLS_PER_CONNECTION):
            connection = stack.enter_context(Connection(server.address))
            for _ in range(CALLS_PER_CONNECTION):
                connection.begin(method)
        time.sleep(0.5)
        neighbour.use(server.address)
        assert check_service(server.address).status == "SERVING"
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < BOUND_S


def test_what_a_check_asks_for_is_bounded(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        for name, code in (
            ("x" * REQUEST_BYTES_MAX, grpc.StatusCode.RESOURCE_EXHAUSTED),
            ("nobody", grpc.StatusCode.NOT_FOUND),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert code_of(caught.value) is code
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(health_pb2.HealthCheckRequest()))
        assert code_of(caught.value) is grpc.StatusCode.UNIMPLEMENTED


def test_readers_and_writers_that_never_read_hold_nobody_up(server: LogServer) -> None:
    """Calls of a job with a window of 0: records that are not taken, acknowledgements that are not taken."""
    neighbour, other = Neighbour(), Neighbour("other")
    other.use(server.address)
    request = log_pb2.ReadRequest(job="other", stream="s0.F", follow=True).SerializeToString()
    inventory = log_pb2.InventoryRequest(job="other").SerializeToString()
    with ExitStack() as stack:
        for _ in range(4):
            deaf = stack.enter_context(Connection(server.address))
            for _ in range(CALLS_PER_CONNECTION // 3):
                deaf.message(deaf.begin(LOG + "Read"), request, end=True)
                deaf.message(deaf.begin(LOG + "Inventory"), inventory, end=True)
                deaf.begin(LOG + "Append")
        time.sleep(0.3)
        neighbour.use(server.address)
        other.use(server.address)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < BOUND_S


@pytest.mark.parametrize("field", ["k\udce9y", "\udca5", "\udc80\x00"])
def test_fields_that_are_no_text_are_not_worth_a_line(server: LogServer, field: str) -> None:
    """What a stranger may say as often as he likes fills no journal: `LogServer.stop` looks for what was said."""
    with Connection(server.address) as odd:
        for _ in range(20):
            odd.message(odd.begin(HEALTH + "Check", {field: field}), NAMED, end=True)
        Neighbour().use(server.address)
