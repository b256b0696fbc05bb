"""The address of another service: said at once, by each command."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.errors import UsageError
from swift_ft.log import admin
from swift_ft.metrics import GAUGE, Exposition, Family, plain
from swift_ft.tools import doctor
from swift_ft_services.health import Health

LONG_S = 60.0


@contextmanager
def grpc_server() -> Iterator[str]:
    """A service of neither kind, with a health of its own, as both have it."""
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Health().handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def web_server() -> Iterator[str]:
    """The port of the metrics, for example."""
    shown = Exposition("127.0.0.1", 0, (Family("y", GAUGE, "Ys."),), lambda: {"y": plain(1)})
    try:
        yield shown.address
    finally:
        shown.close()


def jobs(address: str) -> object:
    with CoordinatorClient(address, "", patience_s=math.inf) as client:
        return client.jobs()


CALLS: dict[str, Callable[[str], object]] = {
    "coordinator": jobs,
    "log server": lambda address: admin.status(address, LONG_S, at_once=True),
    "dropping a job": lambda address: admin.drop(address, "j", LONG_S),
}


@pytest.mark.timeout(LONG_S / 2)
@pytest.mark.parametrize("server", [grpc_server, web_server])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_said_at_once(server: Callable[[], "contextmanager[str]"], call: str) -> None:
    with server() as address:
        kind = "coordinator" if call == "coordinator" else "log server"
        with pytest.raises(UsageError, match=f"^at {address} is another service, not a {kind}$"):
            CALLS[call](address)


@pytest.mark.timeout(LONG_S / 2)
@pytest.mark.parametrize("server", [grpc_server, web_server])
@pytest.mark.parametrize("kind", doctor.SERVICES)
def test_doctor_says_so_too(server: Callable[[], "contextmanager[str]"], kind: str) -> None:
    with server() as address:
        (finding,) = doctor.peer(kind, address, LONG_S)
    assert finding.found == f"another service is there, not a {kind}"
