"""The gate as interceptors of gRPC's two kinds of servers.

A handler gets bytes and is given to `Visit.parse`; one that takes a stream finds its visit in `visit_of`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from services.security.gate import HEALTH, Denied, Gate, Visit
from swift.security.health import SECURITY_KEY

Handler = Any  # grpc.RpcMethodHandler: its types do not say what it has
_visit: ContextVar[Visit] = ContextVar("visit")


def visit_of() -> Visit:
    """(in the handler of a stream of requests, before it gives anything) Its visit."""
    return _visit.get()


class SyncGate(grpc.ServerInterceptor):
    """For a grpc.Server. Tokens and roles are checked in gRPC's own thread, before the call gets one."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def intercept_service(self, continuation: Callable[[Any], Handler], details: Any) -> Handler:
        handler = continuation(details)
        if handler is None:
            return None
        if details.method.startswith(HEALTH):
            return _health(handler, self._gate.shown)
        try:
            visit = self._gate.admit(details.method, details.invocation_metadata)
        except Denied as denied:
            return _refusing(denied)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _sync_unary(handler, visit), None, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _sync_stream(handler, visit), None, handler.response_serializer
            )
        return grpc.stream_stream_rpc_method_handler(
            _sync_streams(handler, visit), handler.request_deserializer, handler.response_serializer
        )


@contextmanager
def _refusals(context: Any) -> Iterator[None]:
    try:
        yield
    except Denied as denied:
        _abort_sync(context, denied)


def _abort_sync(context: Any, denied: Denied) -> None:
    context.set_trailing_metadata(denied.trailers)
    context.abort(denied.code, denied.message)


def _enter(visit: Visit, context: Any) -> None:
    visit.enter(context.peer())
    if not context.add_callback(visit.leave):
        visit.leave()


def _sync_unary(handler: Handler, visit: Visit) -> Callable[[bytes, Any], Any]:
    def call(data: bytes, context: Any) -> Any:
        with _refusals(context):
            _enter(visit, context)
            request = visit.parse(data, handler.request_deserializer)
        return handler.unary_unary(request, context)

    return call


def _sync_stream(handler: Handler, visit: Visit) -> Callable[[bytes, Any], Iterator[Any]]:
    def call(data: bytes, context: Any) -> Iterator[Any]:
        with _refusals(context):
            _enter(visit, context)
            request = visit.parse(data, handler.request_deserializer)
            with closing(handler.unary_stream(request, context)) as replies:
                for reply in replies:
                    visit.still_good()
                    yield reply

    return call


def _sync_streams(handler: Handler, visit: Visit) -> Callable[[Any, Any], Iterator[Any]]:
    def call(requests: Any, context: Any) -> Iterator[Any]:
        with _refusals(context):
            _enter(visit, context)
        _visit.set(visit)
        yield from handler.stream_stream(requests, context)

    return call


def _health(handler: Handler, shown: str) -> Handler:
    """`Check` says besides how the server is protected."""
    if handler.unary_unary is None:
        return handler

    def check(request: Any, context: Any) -> Any:
        context.set_trailing_metadata(((SECURITY_KEY, shown),))
        return handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(
        check, handler.request_deserializer, handler.response_serializer
    )


def _refusing(denied: Denied) -> Handler:
    """Of streams, whatever the call is: so that no message of it is read."""

    def refuse(_requests: Any, context: Any) -> Iterator[Any]:
        _abort_sync(context, denied)
        yield from ()

    return grpc.stream_stream_rpc_method_handler(refuse)


class AsyncGate(grpc.aio.ServerInterceptor):
    """For a grpc.aio.Server."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Handler]], details: Any
    ) -> Handler:
        handler = await continuation(details)
        if handler is None:
            return None
        if details.method.startswith(HEALTH):
            return _async_health(handler, self._gate.shown)
        try:
            visit = self._gate.admit(details.method, details.invocation_metadata)
        except Denied as denied:
            return _async_refusing(denied)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _async_unary(handler, visit), None, handler.response_serializer
            )
        return grpc.unary_stream_rpc_method_handler(
            _async_stream(handler, visit), None, handler.response_serializer
        )


async def _abort(context: Any, denied: Denied) -> None:
    await context.abort(denied.code, denied.message, denied.trailers)


def _async_unary(handler: Handler, visit: Visit) -> Callable[[bytes, Any], Awaitable[Any]]:
    async def call(data: bytes, context: Any) -> Any:
        try:
            visit.enter(context.peer())
            request = visit.parse(data, handler.request_deserializer)
            return await handler.unary_unary(request, context)
        except Denied as denied:
            await _abort(context, denied)
        finally:
            visit.leave()

    return call


def _async_stream(handler: Handler, visit: Visit) -> Callable[[bytes, Any], AsyncIterator[Any]]:
    async def call(data: bytes, context: Any) -> AsyncIterator[Any]:
        try:
            visit.enter(context.peer())
            request = visit.parse(data, handler.request_deserializer)
            async with aclosing(handler.unary_stream(request, context)) as replies:
                async for reply in replies:
                    visit.still_good()
                    yield reply
        except Denied as denied:
            await _abort(context, denied)
        finally:
            visit.leave()

    return call


def _async_health(handler: Handler, shown: str) -> Handler:
    if handler.unary_unary is None:
        return handler

    async def check(request: Any, context: Any) -> Any:
        context.set_trailing_metadata(((SECURITY_KEY, shown),))
        return await handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(
        check, handler.request_deserializer, handler.response_serializer
    )


def _async_refusing(denied: Denied) -> Handler:
    async def refuse(_requests: Any, context: Any) -> AsyncIterator[Any]:
        await _abort(context, denied)
        yield  # what makes it the stream that it stands for

    return grpc.stream_stream_rpc_method_handler(refuse)
