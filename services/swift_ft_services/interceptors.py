"""The gate as interceptors for gRPC's two kinds of servers.

Requests arrive as bytes and are parsed by `Visit.parse`; a handler of a request stream gets its visit by `visit_of`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from swift_ft.log.protocol import Reason
from swift_ft_services.authorization import (
    HEALTH,
    Call,
    Denied,
    Gate,
    Lane,
    Lanes,
    Visit,
    forget_frames,
    peer_address,
)
from swift_ft_services.threads import NONE_LEFT

Handler = Any  # the type stubs of grpc.RpcMethodHandler lack its attributes
_visit: ContextVar[Visit] = ContextVar("visit")


def visit_of() -> Visit:
    """Returns the visit of the call that this handler serves; in a streaming one, before its first reply."""
    return _visit.get()


class SyncGate(grpc.ServerInterceptor):
    """Interceptor for a grpc.Server. Token, role and free capacity are checked in gRPC's own thread, before the call
    gets a thread. Each kind of call has its own concurrency limit, so that one kind cannot starve another.

    Every call is registered with gRPC as a request stream. So a unary request is awaited here, no longer than its limit
    allows, and a thread is not held until the last answer was read.
    """

    def __init__(self, gate: Gate, lanes: Lanes | None = None) -> None:
        self._gate = gate
        self._lanes = lanes or Lanes()

    def intercept_service(self, continuation: Callable[[Any], Handler], details: Any) -> Handler:
        handler = continuation(details)
        if handler is None:
            return None
        method = details.method
        visit, holder = None, ""
        try:
            if not method.startswith(HEALTH):
                visit = self._gate.admit(method, details.invocation_metadata)
                holder = visit.holder
            lane = self._lanes.of(method)
            if not lane.threads.ready():  # gRPC submits the call next, in this thread
                raise Denied(Reason.BUSY, NONE_LEFT)
            call = lane.admit(holder)
            if call is None:
                raise _no_room(lane)
        except Denied as denied:
            forget_frames(denied)
            return self._refusing(method, denied)
        if handler.response_streaming:
            behaviour: Any = _streaming(handler, visit, call)
            behaviour.experimental_thread_pool = lane.threads
            return grpc.stream_stream_rpc_method_handler(behaviour, None, handler.response_serializer)
        behaviour = _single(handler, visit, call)
        behaviour.experimental_thread_pool = lane.threads
        return grpc.stream_unary_rpc_method_handler(behaviour, None, handler.response_serializer)

    def _refusing(self, method: str, denied: Denied) -> Handler:
        """Returns a streaming handler, whatever the call is, so that no message of it is read."""

        def refuse(_requests: Any, context: Any) -> Iterator[Any]:
            self._gate.note(method, denied, peer_address(context.peer()))
            abort(context, denied)
            yield from ()

        refuse.experimental_thread_pool = self._lanes.refusals  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(refuse)


def _no_room(lane: Lane) -> Denied:
    message = (
        f"{lane.limits.calls} calls of this kind ({lane.name}) are under way, or with tokens of this job "
        f"{lane.share}: no more are taken"
    )
    return Denied(Reason.LIMIT, message)


@contextmanager
def _refusals(context: Any, visit: Visit | None) -> Iterator[None]:
    try:
        yield
    except Denied as denied:
        if visit is not None:
            visit.note(denied, context.peer())
        abort(context, denied)


def abort(context: Any, denied: Denied) -> None:
    context.set_trailing_metadata(denied.trailers)
    context.abort(denied.code, denied.message)


def _enter(visit: Visit | None, call: Call, context: Any) -> None:
    call.begin(context)
    if visit is not None:
        visit.enter(context.peer(), call.lane)
        call.on_end = visit.leave
        if not context.add_callback(visit.leave):
            visit.leave()


def _request(handler: Handler, visit: Visit | None, call: Call, requests: Iterator[bytes]) -> Any:
    data = call.first(requests)
    if data is None:
        raise Denied(Reason.INVALID, "not a request of this call")
    return data if visit is None else visit.parse(data, handler.request_deserializer)


def _single(handler: Handler, visit: Visit | None, call: Call) -> Callable[[Any, Any], Any]:
    def answer(requests: Iterator[bytes], context: Any) -> Any:
        with _refusals(context, visit):
            _enter(visit, call, context)
            request = _request(handler, visit, call, requests)
        reply = handler.unary_unary(request, context)
        call.sending()  # until gRPC reports the end of the call
        return reply

    return answer


def _streaming(handler: Handler, visit: Visit | None, call: Call) -> Callable[[Any, Any], Iterator[Any]]:
    def answer(requests: Iterator[bytes], context: Any) -> Iterator[Any]:
        with _refusals(context, visit):
            _enter(visit, call, context)
            if handler.request_streaming:
                assert visit is not None
                _visit.set(visit)
                replies = handler.stream_stream(requests, context)
            else:
                request = _request(handler, visit, call, requests)
                replies = handler.unary_stream(request, context)
            with closing(replies):
                for reply in replies:
                    if visit is not None and not handler.request_streaming:
                        visit.still_good()
                    call.sending()
                    yield reply
                    call.sent()

    return answer


class AsyncGate(grpc.aio.ServerInterceptor):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Handler]], details: Any
    ) -> Handler:
        handler = await continuation(details)
        if handler is None:
            return None
        if details.method.startswith(HEALTH):
            return handler
        try:
            visit = self._gate.admit(details.method, details.invocation_metadata)
        except Denied as denied:
            return _async_refusing(self._gate, details.method, denied)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _async_unary(handler, visit), None, handler.response_serializer
            )
        return grpc.unary_stream_rpc_method_handler(
            _async_stream(handler, visit), None, handler.response_serializer
        )


async def abort_on_loop(context: Any, denied: Denied) -> None:
    forget_frames(denied)  # they hold the request until garbage collection
    await context.abort(denied.code, denied.message, denied.trailers)


@asynccontextmanager
async def _entered(handler: Handler, visit: Visit, data: bytes, context: Any) -> AsyncIterator[Any]:
    """Yields the request. A denial within the context ends the call."""
    try:
        visit.enter(context.peer())
        yield visit.parse(data, handler.request_deserializer)
    except Denied as denied:
        visit.note(denied, context.peer())
        await abort_on_loop(context, denied)
    finally:
        visit.leave()


def _async_unary(handler: Handler, visit: Visit) -> Callable[[bytes, Any], Awaitable[Any]]:
    async def call(data: bytes, context: Any) -> Any:
        async with _entered(handler, visit, data, context) as request:
            _visit.set(visit)
            return await handler.unary_unary(request, context)

    return call


def _async_stream(handler: Handler, visit: Visit) -> Callable[[bytes, Any], AsyncIterator[Any]]:
    async def call(data: bytes, context: Any) -> AsyncIterator[Any]:
        async with (
            _entered(handler, visit, data, context) as request,
            aclosing(handler.unary_stream(request, context)) as replies,
        ):
            async for reply in replies:
                visit.still_good()
                yield reply

    return call


def _async_refusing(gate: Gate, method: str, denied: Denied) -> Handler:
    async def refuse(_requests: Any, context: Any) -> AsyncIterator[Any]:
        gate.note(method, denied, peer_address(context.peer()))
        await abort_on_loop(context, denied)
        yield  # makes this an async generator

    return grpc.stream_stream_rpc_method_handler(refuse)
