"""A writer's connection to one log server: sends, resends, and knows what is acknowledged.

Roles: the writer's worker hands over records (`enqueue`); gRPC's own thread takes the next message out of
`_requests`; the link's thread reads the replies, and connects again after any failure. A record stays in
``unsent`` or ``sent`` until the server says that it is durable. It gets its sequence when it is sent first,
and keeps it: that is how the server knows it again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from swift._pb import log_pb2
from swift.errors import LogUnavailable, SequenceConflict, StaleGeneration, SwiftError, UsageError
from swift.log.assembly import cut
from swift.log.frame import BODY_BYTES_MAX, Bytes, FrameHeader, encode_header
from swift.log.record import RecordKey, stream_tag
from swift.log.rpc import as_error, message_of, method, open_channel, reason_of
from swift.log.wire import Reason, frames_message

_BATCH_BYTES = 1 << 20
_RETRY_S = 0.05
_FULL_RETRY_S = 0.5
# Refused for what was sent: sending it again would be refused again.
_FATAL = {Reason.CONFLICT, Reason.INVALID, Reason.OVERSIZE}


@dataclass(slots=True, eq=False)
class Outgoing:
    """One record on its way, framed but for sequence and generation."""

    stream: str
    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    codec: int
    stored: Bytes
    body_crc: int
    digest: bytes
    held_bytes: int
    """What it takes of the writer's queue until it is acknowledged."""
    sequence: int = -1

    def header(self, tag: int, generation: int) -> bytes:
        return encode_header(
            FrameHeader(
                stream_tag=tag,
                sequence=self.sequence,
                generation=generation,
                key=self.key,
                dtype=self.dtype,
                shape=self.shape,
                codec=self.codec,
                raw_bytes=self.raw_bytes,
                stored_bytes=len(self.stored),
                body_crc=self.body_crc,
                digest=self.digest,
            )
        )


@dataclass(slots=True)
class _Stream:
    name: str
    tag: int
    next_sequence: int | None = None  # None until it was opened once
    acked: int = 0
    asked: bool = False  # in this call
    opened: bool = False
    unsent: deque[Outgoing] = field(default_factory=deque)
    sent: deque[Outgoing] = field(default_factory=deque)


class Link:
    """All streams that one writer has on one server."""

    def __init__(
        self, address: str, job: str, generation: int, name: str, on_change: Callable[[int], None]
    ) -> None:
        """``on_change(freed_bytes)`` is called, without a lock, after acknowledgements and after errors."""
        self.address = address
        self.resent = 0
        self._job = job
        self._generation = generation
        self._on_change = on_change
        self._cond = threading.Condition()
        self._streams: dict[str, _Stream] = {}
        self._by_tag: dict[int, _Stream] = {}
        self._pending = 0
        self._call_number = 0
        self._call: grpc.Call | None = None
        self._rest: deque[Bytes] = deque()  # of the record that was begun last: it follows before all else
        self._credit = 0
        self._body_bytes_max = BODY_BYTES_MAX
        self._error: SwiftError | None = None  # until the next generation
        self._stale = ""  # the server's words, until the next generation
        self._trouble = "it cannot be reached"
        self._progress_at = time.monotonic()
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

    def enqueue(self, record: Outgoing) -> None:
        with self._cond:
            stream = self._streams.get(record.stream)
            if stream is None:
                stream = _Stream(record.stream, stream_tag(self._job, record.stream))
                self._streams[record.stream] = self._by_tag[stream.tag] = stream
            if not self._pending:
                self._progress_at = time.monotonic()
            self._pending += 1
            stream.unsent.append(record)
            self._cond.notify_all()

    @property
    def pending(self) -> int:
        return self._pending

    def error(self, patience_s: float) -> SwiftError | None:
        """What the writer's caller must be told, if anything."""
        with self._cond:
            if self._error is not None:
                return self._error
            waited_s = time.monotonic() - self._progress_at
            if not self._pending or waited_s < patience_s:
                return None
            if self._stale:
                return StaleGeneration(self._stale)
            return LogUnavailable(
                f"log server {self.address} has acknowledged nothing for {waited_s:.0f} s: {self._trouble}"
            )

    def set_generation(self, generation: int, discard: bool) -> int:
        """Opens all streams again under the generation; gives the bytes freed by ``discard``."""
        with self._cond:
            self._generation = generation
            self._error = None
            self._stale = ""
            self._progress_at = time.monotonic()
            freed = 0
            if discard:
                for stream in self._streams.values():
                    for record in (*stream.sent, *stream.unsent):
                        freed += record.held_bytes
                    stream.sent.clear()
                    stream.unsent.clear()
                    stream.next_sequence = None
                self._pending = 0
            self._break_call()
            return freed

    def close(self) -> None:
        with self._cond:
            self._closed = True
            self._break_call()
        self._thread.join(5.0)
        self._channel.close()

    def _break_call(self) -> None:
        self._call_number += 1
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
                    if self._closed or number != self._call_number:
                        return
                    self._cond.wait()
                    message = self._next_message(number)
            yield message

    def _next_message(self, number: int) -> bytes | None:
        if self._closed or number != self._call_number:
            return None
        opens = []
        for stream in self._streams.values():
            if not stream.asked:
                stream.asked = True
                opens.append(
                    log_pb2.Open(
                        job=self._job,
                        stream=stream.name,
                        generation=self._generation,
                        acked_sequence=stream.acked,
                    )
                )
        if opens:
            return log_pb2.AppendRequest(opens=opens).SerializeToString()
        parts: list[Bytes] = []
        size = 0
        if self._rest and self._credit > 0:
            parts.append(self._rest.popleft())
            size += len(parts[0])
            self._credit -= len(parts[0])
        for stream in self._streams.values():
            while self._may_send(stream) and size < _BATCH_BYTES:
                if len(stream.unsent[0].stored) > self._body_bytes_max:
                    self._refuse_size(stream.unsent[0])
                    return None
                record = stream.unsent.popleft()
                if record.sequence < 0:
                    assert stream.next_sequence is not None
                    record.sequence = stream.next_sequence
                    stream.next_sequence += 1
                stream.sent.append(record)
                header = record.header(stream.tag, self._generation)
                first, *rest = cut(record.stored)
                self._rest.extend(rest)
                parts += (header, first)
                size += len(header) + len(first)
                self._credit -= len(header) + len(first)
        return frames_message(parts, size) if parts else None

    def _may_send(self, stream: _Stream) -> bool:
        return stream.opened and bool(stream.unsent) and self._credit > 0 and not self._rest

    def _refuse_size(self, record: Outgoing) -> None:
        self._error = UsageError(
            f"{record.stream} {record.key}: {len(record.stored)} bytes are more than log server "
            f"{self.address} accepts ({self._body_bytes_max}); start it with a larger --body-bytes-max"
        )

    # -- receiving and connecting (the link's thread) ---------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(self._may_connect)
                if self._closed:
                    return
                number = self._begin_call()
                call = self._append(self._requests(number), wait_for_ready=True)
                self._call = call
            pause_s = _RETRY_S
            try:
                for reply in call:
                    self._on_reply(number, reply)
            except grpc.RpcError as error:
                pause_s = self._on_failure(number, error)
            except SwiftError as error:
                with self._cond:
                    self._error = error
                call.cancel()
            with self._cond:
                if number == self._call_number:
                    self._break_call()
                    self._cond.wait_for(lambda: self._closed, pause_s)
            self._on_change(0)

    def _may_connect(self) -> bool:
        return self._closed or (bool(self._streams) and self._error is None and not self._stale)

    def _begin_call(self) -> int:
        self._call_number += 1
        self._credit = 0
        self._rest.clear()
        for stream in self._streams.values():
            stream.asked = stream.opened = False
            self.resent += len(stream.sent)
            stream.unsent.extendleft(reversed(stream.sent))
            stream.sent.clear()
        return self._call_number

    def _on_reply(self, number: int, reply: log_pb2.AppendReply) -> None:
        freed = 0
        with self._cond:
            if number != self._call_number:
                return
            self._credit += reply.credit_bytes
            if reply.HasField("welcome"):
                self._body_bytes_max = reply.welcome.body_bytes_max
            for opened in reply.opened:
                self._on_opened(self._streams[opened.stream], opened.next_sequence)
            for acked in reply.acked:
                freed += self._on_acked(self._streams[acked.stream], acked.durable_sequence)
            if freed:
                self._progress_at = time.monotonic()
            self._cond.notify_all()
        if freed:
            self._on_change(freed)

    def _on_opened(self, stream: _Stream, next_sequence: int) -> None:
        if stream.next_sequence is None:
            stream.next_sequence = stream.acked = next_sequence
        elif next_sequence > stream.next_sequence:
            raise SequenceConflict(
                f"somebody else has written {stream.name}: it is at record {next_sequence}, "
                f"this writer at {stream.next_sequence}"
            )
        stream.opened = True

    def _on_acked(self, stream: _Stream, durable: int) -> int:
        freed = 0
        for waiting in (stream.sent, stream.unsent):
            while waiting and 0 <= waiting[0].sequence < durable:
                freed += waiting.popleft().held_bytes
                self._pending -= 1
        stream.acked = max(stream.acked, durable)
        return freed

    def _on_failure(self, number: int, error: grpc.RpcError) -> float:
        """Sorts out why a call ended; gives how long to wait before the next one."""
        reason = reason_of(error)
        with self._cond:
            if number != self._call_number:
                return 0.0
            self._trouble = message_of(error)
            if reason == Reason.STALE_GENERATION:
                self._stale = message_of(error)
            elif reason in _FATAL:
                self._error = as_error(self.address, error)
        return _FULL_RETRY_S if reason == Reason.FULL else _RETRY_S
