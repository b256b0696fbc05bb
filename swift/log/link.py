"""A writer's connection to one log server: the threads and gRPC around `LinkCore`.

Roles: the writer's worker hands over records (`enqueue`); gRPC's own thread takes the next message out of
`_requests`; the link's thread reads the replies, and connects again after any failure. One lock guards the core.
"""

import threading
import time
from collections.abc import Callable, Iterator

import grpc

from swift._pb import log_pb2
from swift.errors import SwiftError
from swift.log.choice import LinkRate
from swift.log.link_core import RETRY_S, LinkCore, Outgoing
from swift.log.rpc import as_error, message_of, method, open_channel, reason_of


class Link:
    """All streams that one writer has on one server."""

    def __init__(
        self,
        address: str,
        job: str,
        generation: int,
        name: str,
        on_change: Callable[[int], None],
        fsync: Callable[[str], str],
    ) -> None:
        """``on_change(freed_bytes)`` is called, without a lock, after acknowledgements and after errors."""
        self.address = address
        self._core = LinkCore(address, job, generation, time.monotonic(), fsync)
        self._on_change = on_change
        self._cond = threading.Condition()
        self._call: grpc.Call | None = None
        self._closed = False
        self._channel = open_channel(address)
        self._append: grpc.StreamStreamMultiCallable[bytes, log_pb2.AppendReply] = (
            self._channel.stream_stream(
                method("Append"),
                request_serializer=None,
                response_deserializer=log_pb2.AppendReply.FromString,
            )
        )
        self._thread = threading.Thread(target=self._run, name=f"log-link-{name}", daemon=True)
        self._thread.start()

    # -- the writer's side ----------------------------------------------------------------------------

    def enqueue(self, record: Outgoing) -> bool:
        """False if it need not be sent: it is durable already. It goes out at `wake` at the latest."""
        with self._cond:
            return self._core.enqueue(record, time.monotonic())

    def wake(self) -> None:
        """There is something to send, or nothing: all that was handed over goes out."""
        with self._cond:
            self._cond.notify_all()

    def resume(self, stream: str, acked: int, next_sequence: int) -> None:
        """(before any record of the stream) Goes on where a writer that was killed has been."""
        with self._cond:
            self._core.resume(stream, acked, next_sequence)
            self._cond.notify_all()

    def acked(self, stream: str) -> int:
        """Everything of the stream below this sequence is durable, and its memory is not used any more."""
        with self._cond:
            return self._core.acked(stream)

    @property
    def pending(self) -> int:
        return self._core.pending

    @property
    def resent(self) -> int:
        return self._core.resent

    @property
    def trouble(self) -> str:
        """Why the last call ended."""
        return self._core.trouble

    def rate(self) -> LinkRate | None:
        """How fast it has been lately; None at its start."""
        with self._cond:
            return self._core.meter.rate()

    def error(self, patience_s: float) -> SwiftError | None:
        """What the writer's caller must be told, if anything."""
        with self._cond:
            return self._core.error(patience_s, time.monotonic())

    def set_generation(self, generation: int, discard: bool) -> int:
        """Opens all streams again under the generation; gives the bytes freed by ``discard``."""
        with self._cond:
            freed = self._core.set_generation(generation, discard, time.monotonic())
            self._cancel_call()
            return freed

    def take_pending(self) -> list[Outgoing]:
        """Gives what was not acknowledged to the caller, in its order, and sends nothing any more."""
        with self._cond:
            self._closed = True
            self._core.end_call()
            self._cancel_call()
            return self._core.take_pending()

    def close(self) -> None:
        with self._cond:
            self._closed = True
            self._core.end_call()
            self._cancel_call()
        self._thread.join(5.0)
        self._channel.close()

    def _cancel_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._cond.notify_all()

    # -- sending (gRPC's thread) ----------------------------------------------------------------------

    def _requests(self, number: int) -> Iterator[bytes]:
        while True:
            with self._cond:
                message = self._next_message(number)
                while message is None:
                    if self._closed or number != self._core.call_number:
                        return
                    self._cond.wait()
                    message = self._next_message(number)
            yield message

    def _next_message(self, number: int) -> bytes | None:
        return None if self._closed else self._core.next_message(number)

    # -- receiving and connecting (the link's thread) ---------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self._closed or self._core.may_connect)
                if self._closed:
                    return
                number = self._core.begin_call(time.monotonic())
                call = self._append(self._requests(number), wait_for_ready=True)
                self._call = call
            pause_s = RETRY_S
            try:
                for reply in call:
                    self._on_reply(number, reply)
            except grpc.RpcError as error:
                with self._cond:
                    why = as_error(self.address, error)
                    pause_s = self._core.on_failure(number, reason_of(error), message_of(error), why)
            except SwiftError as error:
                with self._cond:
                    self._core.on_error(error)
                call.cancel()
            with self._cond:
                if number == self._core.call_number:
                    self._core.end_call()
                    self._cancel_call()
                    self._cond.wait_for(lambda: self._closed, pause_s)
            self._on_change(0)

    def _on_reply(self, number: int, reply: log_pb2.AppendReply) -> None:
        with self._cond:
            freed = self._core.on_reply(number, reply, time.monotonic())
            self._cond.notify_all()
        if freed:
            self._on_change(freed)
