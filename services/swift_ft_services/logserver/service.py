"""The gRPC service: converts messages to engine calls, and refusals to status codes. It takes no decisions."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from swift_ft._pb import log_pb2
from swift_ft.log.protocol import MEMORY_KEY, REASON_KEY, SERVICE, Reason, server_options, split_frames
from swift_ft_services.authorization import Denied, Gate, Lanes, Visit, forget_frames
from swift_ft_services.health import Health
from swift_ft_services.interceptors import SyncGate, visit_of
from swift_ft_services.logserver.administration import LostServers
from swift_ft_services.logserver.core import Refusal, Refused
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.state import AppendCall
from swift_ft_services.threads import NONE_LEFT, Threads

_MESSAGE_CHARACTERS = 500
"""Maximum length of a refusal's message, which may repeat parts of a request: gRPC limits its size."""

Context = grpc.ServicerContext


class LogServicer:
    """Handlers of the rpcs. gRPC reports a call's end in the thread that serves all calls, so callbacks must not wait
    for a lock."""

    def __init__(self, engine: LogEngine, refused: Callable[[str], None] = lambda reason: None) -> None:
        """`refused(reason)` is called for every call that is refused."""
        self.engine = engine
        self._refused = refused
        self._over = Threads(1, "over")

    def append(self, requests: Iterator[bytes], context: Context) -> Iterator[log_pb2.AppendReply]:
        """Handles the Append rpc: a pump thread takes the writer's messages, this thread yields the replies."""
        try:
            session, outgoing = self.engine.attach()
        except Refused as refused:
            self._abort(context, refused.refusal)
            return
        if not context.add_callback(session.end):
            self.engine.detach(session)  # the call is over already: no callback will come
            return
        visit = visit_of()
        arguments = (session, requests, visit)
        pump = threading.Thread(target=self._pump, args=arguments, name="pump", daemon=True)
        try:
            pump.start()
        except RuntimeError:
            self.engine.detach(session)
            self._abort(context, Refusal(Reason.BUSY, NONE_LEFT))
        yield from outgoing.replies()
        if session.refusal is not None:
            self._abort(context, session.refusal, noted=visit.noted)

    def _pump(self, session: AppendCall, requests: Iterator[bytes], visit: Visit) -> None:
        """Handles the writer's messages until the call ends or is refused."""
        try:
            for message in requests:
                visit.still_good()
                frames, shared = split_frames(message), b""
                if frames is None:
                    request = log_pb2.AppendRequest.FromString(message)
                    visit.check_limits(request)
                    for opening in request.opens:
                        visit.check(opening.job, opening.generation)
                        self.engine.open(session, opening)
                    frames, shared = memoryview(request.frames), request.shared
                if frames or shared:
                    self.engine.handle(session, frames, shared)
            self.engine.finish(session)
            session.end()
        except Refused as refused:
            session.end(refused.refusal)
        except Denied as denied:
            visit.note(denied)
            session.end(Refusal(denied.reason, denied.message))
        except DecodeError:
            words = "not an AppendRequest"
            visit.note(Denied(Reason.INVALID, words))
            session.end(Refusal(Reason.INVALID, words))
        except grpc.RpcError as over:  # the call is gone; the callback ends its handler
            forget_frames(over)
            session.end()
        except Exception as error:  # a bug: the writer must not wait forever
            logging.getLogger(__name__).exception("append failed")
            session.end(Refusal(Reason.CLOSED, f"internal error: {error!r}"))
        finally:
            self.engine.detach(session)

    def read(self, request: log_pb2.ReadRequest, context: Context) -> Iterator[bytes]:
        def over() -> None:
            self._over.submit(self.engine.reading.wake, request.job)

        context.add_callback(over)
        with self.answering(context, "Read"):
            self._take_lost(request)
            request.follow = request.follow and not request.cold
            yield from self.engine.reading.read(request, context.is_active)

    def digests(self, request: log_pb2.DigestsRequest, context: Context) -> Iterator[log_pb2.DigestsReply]:
        with self.answering(context, "Digests"):
            self._take_lost(request)
            for records in self.engine.reading.digests(request):
                yield log_pb2.DigestsReply(records=records)

    def inventory(self, request: log_pb2.InventoryRequest) -> log_pb2.InventoryReply:
        self._take_lost(request)
        return self.engine.reading.inventory(request.job)

    def _take_lost(
        self, request: log_pb2.ReadRequest | log_pb2.DigestsRequest | log_pb2.InventoryRequest
    ) -> None:
        """Puts the job in, by its name here, if the request is about a lost server's records."""
        if request.cold:
            request.job = self._lost().job(request.job, request.cold)

    def _lost(self) -> LostServers:
        if self.engine.lost is None:
            raise Refused(Reason.INVALID, "this server has no object store (--cold)")
        return self.engine.lost

    def fence(self, request: log_pb2.FenceRequest) -> log_pb2.FenceReply:
        self.engine.administration.fence(request.job, request.generation, request.held)
        cold = self.engine.state.storage.cold_folder(request.job)
        return log_pb2.FenceReply(generation=request.generation, cold=cold)

    def trim(self, request: log_pb2.TrimRequest) -> log_pb2.TrimReply:
        if request.cold:
            self._lost().drop(request.job, request.cold)
            return log_pb2.TrimReply(trimmed_below_step=request.below_step)
        trimmed = self.engine.administration.trim(request.job, request.below_step, request.generation)
        return log_pb2.TrimReply(trimmed_below_step=trimmed)

    def reset(self, request: log_pb2.ResetRequest) -> log_pb2.ResetReply:
        self.engine.administration.reset(request.job, request.generation, request.number)
        return log_pb2.ResetReply(cold=self.engine.state.storage.cold_folder(request.job))

    def status(self, request: log_pb2.StatusRequest) -> log_pb2.StatusReply:
        return self.engine.reading.status(request)

    def drop(self, request: log_pb2.DropRequest) -> log_pb2.DropReply:
        records, size = self.engine.administration.drop(request.job, force=request.force)
        if self.engine.lost is not None:
            self.engine.lost.drop_all(request.job)
        return log_pb2.DropReply(records=records, bytes=size)

    @contextmanager
    def answering(self, context: Context, call: str) -> Iterator[None]:
        """Turns any exception into a status that ends the call."""
        try:
            yield
        except Refused as refused:
            refusal = refused.refusal
        except Exception as error:  # a bug: the caller gets one line, the log the traceback
            logging.getLogger(__name__).exception("%s failed", call)
            words = f"internal error in {call}: {error!r}; see the log of the log server"
            refusal = Refusal(Reason.INTERNAL, words)
        else:
            return
        self._abort(context, refusal)

    def _abort(self, context: Context, refusal: Refusal, *, noted: bool = False) -> None:
        """Ends the call with its refusal. `noted`: it is counted already."""
        if not noted:
            self._refused(refusal.reason.value)
        context.set_trailing_metadata(((REASON_KEY, refusal.reason.value),))
        context.abort(refusal.reason.status, refusal.message[:_MESSAGE_CHARACTERS])


def _handlers(servicer: LogServicer) -> grpc.GenericRpcHandler:
    """Returns handlers as the generated code would, but frames pass as bytes: see `swift_ft.log.protocol`."""

    def serialize(message: Message) -> bytes:
        return message.SerializeToString()

    def unary(method: Any, request: type[Message]) -> "grpc.RpcMethodHandler[Any, Any]":
        def answer(request: Message, context: Context) -> Any:
            with servicer.answering(context, method.__name__.capitalize()):
                return method(request)

        return grpc.unary_unary_rpc_method_handler(answer, request.FromString, serialize)

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Append": grpc.stream_stream_rpc_method_handler(servicer.append, None, serialize),
            "Read": grpc.unary_stream_rpc_method_handler(servicer.read, log_pb2.ReadRequest.FromString, None),
            "Digests": grpc.unary_stream_rpc_method_handler(
                servicer.digests, log_pb2.DigestsRequest.FromString, serialize
            ),
            "Inventory": unary(servicer.inventory, log_pb2.InventoryRequest),
            "Fence": unary(servicer.fence, log_pb2.FenceRequest),
            "Trim": unary(servicer.trim, log_pb2.TrimRequest),
            "Reset": unary(servicer.reset, log_pb2.ResetRequest),
            "Status": unary(servicer.status, log_pb2.StatusRequest),
            "Drop": unary(servicer.drop, log_pb2.DropRequest),
        },
    )


def make_server(
    engine: LogEngine, gate: Gate | None = None, refused: Callable[[str], None] = lambda reason: None
) -> tuple[grpc.Server, Health]:
    """Creates a server that is not bound or started yet, and its health service, which reports NOT_SERVING. Without a
    gate every call is allowed. `refused(reason)` is called for every call that is refused."""
    gate = gate or Gate(None)
    gate.generation_of = engine.state.core.generation_of
    gate.on_denied = refused
    lanes = Lanes()
    server = grpc.server(lanes.refusals, interceptors=[SyncGate(gate, lanes)], options=server_options())
    checks = Health(gate.shown)
    server.add_generic_rpc_handlers((checks.handlers(), _handlers(LogServicer(engine, refused))))

    def on_health(serving: bool) -> None:
        serving = serving and engine.state.serves
        checks.more = ((MEMORY_KEY, engine.state.memory_socket),)
        checks.set("", SERVICE, serving=serving)

    engine.state.on_health = on_health
    on_health(False)
    return server, checks
