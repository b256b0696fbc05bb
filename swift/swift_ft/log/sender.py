"""A writer's connection to one log server: the threads and gRPC around `LinkCore`."""

import threading
import time
from collections.abc import Callable, Iterator

import grpc

from swift_ft._pb import log_pb2
from swift_ft.errors import SwiftError
from swift_ft.log.protocol import as_error, message_of, method, open_channel, reason_of
from swift_ft.log.record import RecordKey
from swift_ft.log.sender_core import RETRY_S, LinkCore, Outgoing
from swift_ft.log.shared_memory import hand_over

# Error message, for the trainer's author, if a recomputed tensor differs from the logged one.

_LOADER = "; is what it comes from registered (session.register(loader=...))?"
_CAPTURED = "; the step depends on something that is not captured"
_DIGEST_SHOWN = 4


def differs_words(stream: str, key: RecordKey, logged: bytes, computed: bytes, who: str = "") -> str:
    """Returns the message for a recomputed tensor that differs. `who`: the computing rank, if it is another one."""
    by = f"the tensor that {who} computed" if who else "the tensor computed again"
    digests = (
        f"{by} ({computed[:_DIGEST_SHOWN].hex()}) is not the logged one ({logged[:_DIGEST_SHOWN].hex()})"
    )
    what, hint = _named(stream, key)
    return f"{stream} {key}: {what}: {digests}{hint}"


def _named(stream: str, key: RecordKey) -> tuple[str, str]:
    place, _, kind = stream.rpartition(".")
    stage = place.partition("c")[0].removeprefix("s")
    where = f"of stage {stage} in step {key.step}, microbatch {key.microbatch}"
    match kind:
        case "X":
            return f"external input {key.slot} {where}", _LOADER
        case "T":
            return f"the target {where}", _LOADER
        case "F":
            return f"the activation {where}", _CAPTURED
        case "B":
            return f"the gradient {where}", _CAPTURED
    return f"the result of collective {key.slot} in step {key.step}", _CAPTURED


# Roles: the writer hands over records (`enqueue`); gRPC's own thread takes the next message from
# `_requests`; the link's thread reads the replies, and reconnects after any failure. One lock guards the core.


class Link:
    def __init__(
        self,
        address: str,
        job: str,
        generation: int,
        name: str,
        on_change: Callable[[], None],
        fsync: str,
        memory: int | None = None,
    ) -> None:
        """``on_change()`` is called, without a lock, after acknowledgements and after errors. ``memory``: the memfd in
        which records with a place lie."""
        self.address = address
        self._memory = memory
        self.core = LinkCore(address, job, generation, time.monotonic(), fsync)
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
        """Queues a record, which is sent at the next `wake` at the latest. Returns False if it is already durable."""
        with self._cond:
            return self.core.enqueue(record, time.monotonic())

    def wake(self) -> None:
        """Wakes the sending thread, which sends all queued records. Harmless if there are none."""
        with self._cond:
            self._cond.notify_all()

    def resume(self, stream: str, acked: int, next_sequence: int) -> None:
        """(before any record of the stream) Continues at the position of a writer that was killed."""
        with self._cond:
            self.core.resume(stream, acked, next_sequence)
            self._cond.notify_all()

    def acked(self, stream: str) -> int:
        """Returns the sequence below which all records of the stream are durable and their memory is unused."""
        with self._cond:
            return self.core.acked(stream)

    def pace(self) -> float | None:
        """Returns the raw bytes per second acknowledged lately; None at its start."""
        with self._cond:
            return self.core.meter.pace()

    def error(self, patience_s: float) -> SwiftError | None:
        with self._cond:
            return self.core.error(patience_s, time.monotonic())

    def set_generation(self, generation: int, discard: bool) -> None:
        """Reopens all streams under the generation. ``discard``: drops all unacknowledged records."""
        with self._cond:
            self.core.set_generation(generation, discard, time.monotonic())
            self._cancel_call()

    def close(self) -> None:
        with self._cond:
            self._closed = True
            self.core.end_call()
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
                    if self._closed or number != self.core.call_number:
                        return
                    self._cond.wait()
                    message = self._next_message(number)
            yield message

    def _next_message(self, number: int) -> bytes | None:
        return None if self._closed else self.core.next_message(number)

    # -- receiving and connecting (the link's thread) ---------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self._closed or self.core.may_connect)
                if self._closed:
                    return
                number = self.core.begin_call(time.monotonic())
                call = self._append(self._requests(number), wait_for_ready=True)
                self._call = call
            pause_s = RETRY_S
            try:
                for reply in call:
                    self._on_reply(number, reply)
            except grpc.RpcError as error:
                with self._cond:
                    why = as_error(self.address, error)
                    pause_s = self.core.on_failure(number, reason_of(error), message_of(error), why)
            except SwiftError as error:
                with self._cond:
                    self.core.on_error(error)
                call.cancel()
            with self._cond:
                if number == self.core.call_number:
                    self.core.end_call()
                    self._cancel_call()
                    ended = self.core.call_number
                    # A new generation does not wait: what it fenced has ended this call.
                    self._cond.wait_for(lambda: self._closed or self.core.call_number != ended, pause_s)  # noqa: B023
            self._on_change()

    def _on_reply(self, number: int, reply: log_pb2.AppendReply) -> None:
        shared = (
            self._memory is not None
            and bool(reply.welcome.memory_socket)
            and hand_over(reply.welcome.memory_socket, reply.welcome.memory_key, self._memory)
        )
        with self._cond:
            if shared:
                self.core.share(number)
            acked = self.core.on_reply(number, reply, time.monotonic())
            self._cond.notify_all()
        if acked:
            self._on_change()
