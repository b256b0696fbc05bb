"""A connection has room for few calls at once: one that has ended gives its place back, however it ended."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.protocol import CALLS_PER_CONNECTION, code_of
from swift_ft.tokens import Authority, Role, SigningKey, new_key
from swift_ft_services.authorization import Gate
from tests.hostile.world import BOUND_S, Server, opening


@pytest.fixture(autouse=True)
def nobody_looks_for_cycles() -> Iterator[None]:
    """A server does so rarely."""
    gc.disable()
    yield
    gc.enable()


def code(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return code_of(error).name
    return "OK"


@pytest.mark.parametrize(
    ("bearer", "said"),
    [("", "UNAUTHENTICATED"), ("x", "UNAUTHENTICATED"), ("token", "PERMISSION_DENIED")],
)
def test_calls_that_are_refused(tmp_path: Path, bearer: str, said: str) -> None:
    signing, verifying = new_key(tmp_path / "keys")
    with Server(tmp_path / "log", gate=Gate(Authority(verifying.parent))) as server:
        token = SigningKey.load(signing, "--key").mint("other", [Role.OPERATOR], 60)
        metadata = [("authorization", f"Bearer {token if bearer == 'token' else bearer}")] if bearer else []
        request = log_pb2.InventoryRequest(job="job")
        for _ in range(5 * CALLS_PER_CONNECTION):
            found = code(lambda: server.stub.Inventory(request, timeout=BOUND_S, metadata=metadata))
            assert found == said


@pytest.mark.parametrize("kind", ["Append", "Read", "Status"])
def test_calls_that_are_cancelled(tmp_path: Path, kind: str) -> None:
    with Server(tmp_path / "log") as server:
        method = server.channel.stream_stream(f"/swift.log.v1.Log/{kind}", None, None)
        for _ in range(5 * CALLS_PER_CONNECTION):
            call = method(iter([opening("job")] if kind == "Append" else []), timeout=BOUND_S)
            call.cancel()
            assert code(lambda: server.stub.Status(log_pb2.StatusRequest(), timeout=BOUND_S)) == "OK"
