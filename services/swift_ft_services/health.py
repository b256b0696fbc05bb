"""grpc.health.v1 for both services. The answers include the server's version and clock, for `swift-ft doctor`.

Health calls need no token. So only the number of watches is kept, in total and per address. No lock is held while
anything is sent: a watcher that does not read blocks only itself.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from swift_ft.credentials import SECURITY_KEY
from swift_ft.log.protocol import REASON_KEY, TIME_KEY, VERSION_KEY, Reason
from swift_ft_services.authorization import peer_address

NAME = "grpc.health.v1.Health"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
REQUEST_BYTES_MAX = 256
WATCHES_MAX = 32
WATCHES_PER_PEER = 16
WATCH_POLL_S = 0.05
_THREAD_POLL_S = 0.25


class Refused(Exception):
    """Refuses the call with this code and reason."""

    def __init__(self, code: grpc.StatusCode, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.trailers = ((REASON_KEY, reason.value),)


class Statuses:
    """Serving status of each name, and the number of watches. Thread-safe."""

    def __init__(self, shown: str = "") -> None:
        """``shown``: how the server is protected; sent with every answer to `Check`."""
        self._shown = shown
        self._statuses: dict[str, int] = {"": NOT_SERVING}
        self._over = False
        self._lock = threading.Lock()
        self._watches: Counter[str] = Counter()

    def set(self, name: str, *, serving: bool) -> None:
        self._statuses[name] = SERVING if serving else NOT_SERVING

    def end(self) -> None:
        """Sets all names to NOT_SERVING for good; each watcher gets that as its last answer."""
        self._over = True

    @property
    def over(self) -> bool:
        return self._over

    @property
    def watches(self) -> int:
        with self._lock:
            return self._watches.total()

    def of(self, name: str) -> int | None:
        """Returns the status of a name, or None if it is unknown."""
        status = self._statuses.get(name)
        return NOT_SERVING if status is not None and self._over else status

    def about(self, said: Any) -> tuple[tuple[str, str], ...]:
        """Returns trailing metadata: the given ones, and the server's version, time and protection."""
        about = [(VERSION_KEY, metadata.version("swift-ft")), (TIME_KEY, f"{time.time():.6f}")]
        return (*(said or ()), *about, (SECURITY_KEY, self._shown))

    def check(self, data: bytes) -> health_pb2.HealthCheckResponse:
        status = self.of(asked_for(data))
        if status is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    @contextmanager
    def watching(self, peer: str) -> Iterator[None]:
        """(context manager) Counts one watch more. Raises Refused if there are too many."""
        address = peer_address(peer)
        with self._lock:
            if self._watches[address] >= WATCHES_PER_PEER or self._watches.total() >= WATCHES_MAX:
                message = f"too many watches: {WATCHES_PER_PEER} from an address, {WATCHES_MAX} in all; Check instead"
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.LIMIT, message)
            self._watches[address] += 1
        try:
            yield
        finally:
            with self._lock:
                self._watches[address] -= 1
                if not self._watches[address]:
                    del self._watches[address]

    def news(self, name: str, last: int | None) -> tuple[health_pb2.HealthCheckResponse | None, int, bool]:
        """Returns the answer to send to a watcher that got ``last`` (None: no change), the status it has then, and
        whether that is the last answer."""
        over = self._over  # read before the status, so that the last answer is NOT_SERVING
        status = self.of(name)
        status = UNKNOWN if status is None else status
        return (health_pb2.HealthCheckResponse(status=status) if status != last else None), status, over


def asked_for(data: bytes | None) -> str:
    """Returns the service name in a request. Raises Refused."""
    if data is not None and len(data) > REQUEST_BYTES_MAX:
        message = f"a request of {len(data)} bytes: names here are short"
        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.OVERSIZE, message)
    try:
        if data is not None:
            return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError:
        pass
    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID, "not a request of this call")


def _handlers(check: Any, watch: Any) -> grpc.GenericRpcHandler:
    serialize = health_pb2.HealthCheckResponse.SerializeToString
    return grpc.method_handlers_generic_handler(
        NAME,
        {
            "Check": grpc.unary_unary_rpc_method_handler(check, None, serialize),
            "Watch": grpc.unary_stream_rpc_method_handler(watch, None, serialize),
        },
    )


class Health:
    """Health service of a server with threads; `swift_ft_services.authorization` provides the threads."""

    def __init__(self, shown: str = "") -> None:
        self.statuses = Statuses(shown)

    def handlers(self) -> grpc.GenericRpcHandler:
        return _handlers(self._check, self._watch)

    def _check(self, data: bytes, context: Any) -> Any:
        try:
            answer = self.statuses.check(data)
        except Refused as refused:
            _abort(context, refused)
            raise AssertionError("abort returned") from None
        context.set_trailing_metadata(self.statuses.about(None))
        return answer

    def _watch(self, data: bytes, context: Any) -> Iterator[Any]:
        gone = threading.Event()
        if not context.add_callback(gone.set):
            return
        try:
            name = asked_for(data)
            with self.statuses.watching(context.peer()):
                last, over = None, False
                while not over and not gone.is_set():
                    answer, last, over = self.statuses.news(name, last)
                    if answer is not None:
                        yield answer
                    if not over:
                        gone.wait(_THREAD_POLL_S)
        except Refused as refused:
            _abort(context, refused)


class AioHealth:
    """Health service of a server on an asyncio loop."""

    def __init__(self, shown: str = "") -> None:
        self.statuses = Statuses(shown)

    def handlers(self) -> grpc.GenericRpcHandler:
        return _handlers(self._check, self._watch)

    async def _check(self, data: bytes, context: Any) -> Any:
        try:
            answer = self.statuses.check(data)
        except Refused as refused:
            await context.abort(refused.code, str(refused), refused.trailers)
        context.set_trailing_metadata(self.statuses.about(context.trailing_metadata()))
        return answer

    async def _watch(self, data: bytes, context: Any) -> AsyncIterator[Any]:
        """Ends once it has reported the shutdown: gRPC logs a traceback for every call that a stop cuts short."""
        try:
            name = asked_for(data)
            with self.statuses.watching(context.peer()):
                last, over = None, False
                while not over:
                    answer, last, over = self.statuses.news(name, last)
                    if answer is not None:
                        yield answer
                    if not over:
                        await asyncio.sleep(WATCH_POLL_S)
        except Refused as refused:
            await context.abort(refused.code, str(refused), refused.trailers)

    async def shut_down(self, timeout_s: float) -> None:
        """Sets NOT_SERVING for good. Returns once all watchers have received it, or after the timeout."""
        self.statuses.end()
        deadline = time.monotonic() + timeout_s
        while self.statuses.watches and time.monotonic() < deadline:
            await asyncio.sleep(WATCH_POLL_S)


def _abort(context: Any, refused: Refused) -> None:
    context.set_trailing_metadata(refused.trailers)
    context.abort(refused.code, str(refused))
