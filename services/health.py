"""grpc.health.v1 for both services. With its answer a server says its version and its clock, for `swift-ft doctor`."""

import asyncio
import time
from importlib import metadata
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from swift.log.wire import TIME_KEY, VERSION_KEY

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
WATCH_POLL_S = 0.05


def _tell(context: Any) -> None:
    """Besides what others have said already: how the server is protected."""
    said = tuple(context.trailing_metadata() or ())
    about = ((VERSION_KEY, metadata.version("swift-ft")), (TIME_KEY, f"{time.time():.6f}"))
    context.set_trailing_metadata(said + about)


class TellingHealth(health.HealthServicer):  # type: ignore[misc]
    """For a server of threads."""

    def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:  # noqa: N802
        _tell(context)
        return super().Check(request, context)


class TellingAioHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """For a server on an asyncio loop."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers = 0

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> Any:
        _tell(context)
        return await super().Check(request, context)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """Ends once it has told of the shutdown: gRPC logs a traceback for every call that a stop cuts short."""
        last = None
        self._watchers += 1
        try:
            while True:
                last_look = self._gracefully_shutting_down
                status = self._server_status.get(request.service, UNKNOWN)
                if status != last:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    last = status
                if last_look:
                    return
                await asyncio.sleep(WATCH_POLL_S)
        finally:
            self._watchers -= 1

    async def shut_down(self, timeout_s: float) -> None:
        """NOT_SERVING from now on; returns once those who watch know it."""
        await self.enter_graceful_shutdown()
        deadline = time.monotonic() + timeout_s
        while self._watchers and time.monotonic() < deadline:
            await asyncio.sleep(WATCH_POLL_S)
