"""Health checks and half-open calls, by clients that no library makes: nobody else waits for them, nor does SIGTERM."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft._pb import log_pb2
from swift_ft.log.protocol import CALLS_PER_CONNECTION, SERVICE, code_of, open_channel, reason_of
from swift_ft.tokens import LOG
from swift_ft_services.health import REQUEST_BYTES_MAX, WATCHES_PER_PEER
from tests.health_probe import check_service
from tests.hostile.clients import Connection
from tests.hostile.world import BOUND_S, Neighbour, Server
from tests.integration.launch_world import wait_until
from tests.integration.logserver_world import LogServer

HEALTH = "/grpc.health.v1.Health/"
NAMED = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LogServer]:
    """A process of its own, so that it can be stopped as an operator does."""
    with LogServer(tmp_path / "log") as server:
        yield server


def test_a_watch_that_nobody_reads_freezes_nothing(server: LogServer) -> None:
    """One that reads, one with a window of 0, and the first one goes."""
    neighbour = Neighbour()
    neighbour.use(server.address)
    with Connection(server.address, window=1 << 16) as reading, Connection(server.address) as deaf:
        first = reading.begin(HEALTH + "Watch")
        reading.message(first, NAMED, end=True)
        for _ in range(3):
            deaf.message(deaf.begin(HEALTH + "Watch"), NAMED, end=True)
        time.sleep(0.2)
        reading.reset(first)
        for _ in range(3):
            neighbour.use(server.address)
        assert check_service(server.address).status == "SERVING"
        began = time.monotonic()
        server.stop()  # SIGTERM, while these calls are there
        assert time.monotonic() - began < BOUND_S


def test_watches_that_come_and_go_leave_nothing(server: LogServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        for number in range(120):
            call = watch(health_pb2.HealthCheckRequest(service=SERVICE if number % 2 else f"x{number}"))
            if number % 3 == 0:
                with suppress(grpc.RpcError):  # the last ones may not have gone yet
                    next(call)
            call.cancel()
    Neighbour().use(server.address)
    assert check_service(server.address).status == "SERVING"


@pytest.mark.parametrize(
    "method",
    [
        HEALTH + "Check",
        LOG + "Fence",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in (HEALTH + "Watch", LOG + "Inventory")),
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


def test_watches_are_bounded_and_so_is_what_they_ask_for(tmp_path: Path) -> None:
    """Of one peer: its connections count together."""
    with Server(tmp_path / "log") as server, ExitStack() as stack:
        stub = health_pb2_grpc.HealthStub(server.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(WATCHES_PER_PEER)]
        assert {next(watch).status for watch in watches} == {health_pb2.HealthCheckResponse.SERVING}
        stub = health_pb2_grpc.HealthStub(stack.enter_context(open_channel(server.address)))
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(health_pb2.HealthCheckRequest()))
        assert (code_of(caught.value), reason_of(caught.value)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "limit",
        )
        for call in (stub.Check, lambda request: next(stub.Watch(request))):
            with pytest.raises(grpc.RpcError) as caught:
                call(health_pb2.HealthCheckRequest(service="x" * REQUEST_BYTES_MAX))
            assert code_of(caught.value) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watch in watches:
            watch.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert code_of(caught.value) is grpc.StatusCode.NOT_FOUND

        def admitted() -> health_pb2.HealthCheckResponse | None:
            """The ends of the others come over another connection, and may come later."""
            with suppress(grpc.RpcError):
                return next(stub.Watch(health_pb2.HealthCheckRequest(service="nobody")))
            return None

        unknown = wait_until(admitted, "their places to be free")
        assert unknown.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_a_watch_is_told_of_every_change_and_of_the_end(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server:
        watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        server.engine.state.on_health(False)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


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
