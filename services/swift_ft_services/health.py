"""grpc.health.v1 for both services. The answers include the server's version and clock, for `swift-ft doctor`.

Health calls need no token. So only `Check` is served: a `Watch` would let any client hold a call for as long as it
likes.
"""

import time
from importlib import metadata
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from swift_ft.credentials import SECURITY_KEY
from swift_ft.log.protocol import TIME_KEY, VERSION_KEY, Reason
from swift_ft_services.authorization import Denied
from swift_ft_services.interceptors import abort, abort_on_loop

NAME = "grpc.health.v1.Health"
REQUEST_BYTES_MAX = 256


class Health:
    def __init__(self, shown: str = "") -> None:
        """``shown``: how the server is protected; sent with every answer."""
        self._shown = shown
        self.more: tuple[tuple[str, str], ...] = ()
        """Metadata that is sent as well."""
        self._serving = {"": False}

    def problem(self) -> str:
        return "" if self._serving[""] else "it does not serve"

    def set(self, *names: str, serving: bool) -> None:
        self._serving |= dict.fromkeys(names, serving)

    def handlers(self, *, on_loop: bool = False) -> grpc.GenericRpcHandler:
        """``on_loop``: for a grpc.aio.Server."""
        check: Any = self._check_on_loop if on_loop else self._check
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            check, None, health_pb2.HealthCheckResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(NAME, {"Check": handler})

    def _check(self, data: bytes, context: Any) -> Any:
        try:
            return self._answer(data, context)
        except Denied as refused:
            abort(context, refused)

    async def _check_on_loop(self, data: bytes, context: Any) -> Any:
        try:
            return self._answer(data, context)
        except Denied as refused:
            await abort_on_loop(context, refused)

    def _answer(self, data: bytes, context: Any) -> health_pb2.HealthCheckResponse:
        if len(data) > REQUEST_BYTES_MAX:
            message = f"a request of {len(data)} bytes: names here are short"
            raise Denied(Reason.OVERSIZE, message)
        try:
            name = health_pb2.HealthCheckRequest.FromString(data).service
        except DecodeError:
            message = "not a request of this call"
            raise Denied(Reason.INVALID, message) from None
        serving = self._serving.get(name)
        if serving is None:
            raise Denied(Reason.UNKNOWN, "there is no such service here")
        version, now = metadata.version("swift-ft"), f"{time.time():.6f}"
        about = ((VERSION_KEY, version), (TIME_KEY, now), (SECURITY_KEY, self._shown))
        context.set_trailing_metadata((*about, *self.more))
        known = health_pb2.HealthCheckResponse
        return known(status=known.SERVING if serving else known.NOT_SERVING)
