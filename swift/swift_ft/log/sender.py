"""Delivery of the ring's records: they are digested, compared with those in the log, compressed and sent.

    (sidecar)  ``put(item)`` → (worker) digest → compare → compress → (a link per server) send → (server) acknowledge
    (sidecar)  ``on_change`` after every batch and every answer, ``on_error`` when a record is refused

A record goes to every server, each of which assigns its own sequence, and is held until all have acknowledged it.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from swift_ft._pb import log_pb2
from swift_ft.errors import (
    Divergence,
    RecordCorrupt,
    ServiceError,
    SwiftError,
    UsageError,
)
from swift_ft.log.codec import check_codec, compress
from swift_ft.log.frame import (
    CODECS,
    checksum,
)
from swift_ft.log.protocol import (
    as_error,
    message_of,
    method,
    open_channel,
    reason_of,
)
from swift_ft.log.record import DTYPE_BY_NAME, RecordKey, check_name, digest_of
from swift_ft.log.sender_core import BATCH_BYTES, RETRY_S, LinkCore, Outgoing

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


# A writer's connection to one log server: the threads and gRPC around `LinkCore`.
#
# Roles: the writer's worker hands over records (`enqueue`); gRPC's own thread takes the next message from
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
    ) -> None:
        """``on_change()`` is called, without a lock, after acknowledgements and after errors."""
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
        """Queues a record, which is sent at the next `wake` at the latest. Returns False if it is already durable."""
        with self._cond:
            return self._core.enqueue(record, time.monotonic())

    def wake(self) -> None:
        """Wakes the sending thread, which sends all queued records. Harmless if there are none."""
        with self._cond:
            self._cond.notify_all()

    def resume(self, stream: str, acked: int, next_sequence: int) -> None:
        """(before any record of the stream) Continues at the position of a writer that was killed."""
        with self._cond:
            self._core.resume(stream, acked, next_sequence)
            self._cond.notify_all()

    def acked(self, stream: str) -> int:
        """Returns the sequence below which all records of the stream are durable and their memory is unused."""
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
        """Reason why the last call ended."""
        return self._core.trouble

    def pace(self) -> float | None:
        """Returns the raw bytes per second acknowledged lately; None at its start."""
        with self._cond:
            return self._core.meter.pace()

    def error(self, patience_s: float) -> SwiftError | None:
        with self._cond:
            return self._core.error(patience_s, time.monotonic())

    def set_generation(self, generation: int, discard: bool) -> None:
        """Reopens all streams under the generation. ``discard``: drops all unacknowledged records."""
        with self._cond:
            self._core.set_generation(generation, discard, time.monotonic())
            self._cancel_call()

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
            self._on_change()

    def _on_reply(self, number: int, reply: log_pb2.AppendReply) -> None:
        with self._cond:
            acked = self._core.on_reply(number, reply, time.monotonic())
            self._cond.notify_all()
        if acked:
            self._on_change()


@dataclass(slots=True, eq=False)
class Item:
    stream: str
    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    body: memoryview
    framed: Callable[..., Outgoing]
    """``framed(server, **fields)`` makes the copy of the record for one server, an `Outgoing` with these fields."""
    sent_before: Collection[str] = ()
    """Servers that a killed writer has sent it to: it is sent there again whatever they hold."""
    stored_bytes: int = 0
    """Bytes of the body after compression."""
    sent_to: tuple[str, ...] = ()
    """Servers whose links it was handed to."""
    outcome: str = ""
    """Result of the worker: "sent", "copied" (only to servers that lacked it), "equal" or "refused"."""


@dataclass(slots=True)
class _Known:
    """A record that the log has, or that is being sent to it."""

    digest: bytes
    servers: set[str] = field(default_factory=set)
    """Servers that hold it, or that it is being sent to."""


class Delivery:
    """A queue of records with one worker thread, and a link to each of the servers that keep a copy."""

    def __init__(
        self,
        servers: Sequence[str],
        job: str,
        generation: int,
        *,
        codec: str,
        fsync: str,
        patience_s: float,
        name: str,
        on_change: Callable[[], None],
        on_error: Callable[[SwiftError], None],
        lock: threading.Condition,
    ) -> None:
        """The options are those of `swift_ft.log.sidecar_client.SidecarWriter`. ``lock`` guards the queue and the
        caller's own state. Threads that wait on it are notified after every change. Threads of the delivery call, never
        before the first `put`:

        ``on_change()`` without the lock, when records were compared, sent or acknowledged, or a call to a server ended
        ``on_error(error)`` holding the lock, for the first refused record of a generation, before `error` shows it
        """
        self._lock = lock
        self.servers = tuple(dict.fromkeys(servers))
        """Servers that keep the streams."""
        self.pace_bytes_per_s = 0.0
        """Raw bytes per second that the slowest server acknowledged lately, while it was busy; 0: not known yet."""
        self.patience_s = patience_s
        """Seconds without an acknowledgement by a server after which that is an error."""
        self._job = job
        self._generation = generation
        self._name = name or job
        self._on_change, self._on_error = on_change, on_error
        self._inbox: deque[Item] = deque()
        self._working: Item | None = None
        self._known: dict[str, dict[RecordKey, _Known]] = {}
        self._error: SwiftError | None = None
        self._closed = False
        check_codec(codec)
        self._codec = codec
        self.links = {
            address: Link(address, job, generation, self._name, self.changed, fsync)
            for address in self.servers
        }
        """Link of each server."""
        self._worker = threading.Thread(target=self._work, name=f"log-writer-{self._name}", daemon=True)
        self._worker.start()

    # -- the sidecar's side -----------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        with self._lock:
            self._inbox.append(item)
            self._lock.notify_all()

    @property
    def resent(self) -> int:
        """Number of records sent again after a lost connection or a fence."""
        return sum(link.resent for link in self.links.values())

    @property
    def error(self) -> SwiftError | None:
        """Error of the first refused record, until the next generation."""
        return self._error

    def trouble(self) -> SwiftError | None:
        errors = (link.error(self.patience_s) for link in self.links.values())
        return self._error or next((error for error in errors if error is not None), None)

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """Declares records that one server (or every one) holds of a stream: these keys are compared, not sent there.
        Raises RecordCorrupt if another copy has a different record under one of these keys."""
        check_name("stream", stream)
        with self._lock:
            known = self._known.setdefault(stream, {})
            for key, digest in digests.items():
                record = known.setdefault(key, _Known(digest))
                if record.digest != digest:
                    raise RecordCorrupt(
                        f"{stream} {key} differs between its copies ({record.digest.hex()}; on {server or 'others'} "
                        f"{digest.hex()})"
                    )
                record.servers.update([server] if server else self.servers)

    def expect_as_others(self, stream: str, server: str) -> None:
        """Assumes that a server whose copy cannot be read holds the same records as the others, so that none of them
        is written over it."""
        with self._lock:
            for record in self._known.get(stream, {}).values():
                record.servers.add(server)

    def forget_below(self, step: int) -> None:
        """Forgets the keys of older steps, which will not be appended again."""
        with self._lock:
            # Keys of records that still wait to be compared are kept.
            waiting = [*self._inbox, *([self._working] if self._working is not None else [])]
            step = min([step, *(item.key.step for item in waiting)])
            for stream, known in self._known.items():
                self._known[stream] = {key: value for key, value in known.items() if key.step >= step}

    def set_generation(self, generation: int, *, discard: bool = False) -> None:
        """Reopens the streams under the generation, resends unacknowledged records, and clears errors. ``discard``:
        drops unacknowledged records and all knowledge of the log's content instead, because the log was emptied."""
        with self._lock:
            if generation < self._generation:
                raise UsageError(f"generation {generation} is older than {self._generation}")
            if discard:
                self._inbox.clear()
                self._lock.wait_for(lambda: self._working is None)
                self._known.clear()
            self._generation = generation
            for link in self.links.values():
                link.set_generation(generation, discard)
            self._error = None
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._worker.join(5.0)
        for link in self.links.values():
            link.close()

    # -- the background ---------------------------------------------------------------------------------

    def changed(self) -> None:
        """(any thread) Updates the pace, and notifies waiting threads and the sidecar."""
        # A record is durable only when all servers have it, so the slowest link sets the pace.
        paces = (link.pace() for link in self.links.values())
        pace = min((pace for pace in paces if pace is not None), default=None)
        with self._lock:
            self.pace_bytes_per_s = pace or self.pace_bytes_per_s
            self._lock.notify_all()
        self._on_change()

    def refuse(self, error: SwiftError) -> None:
        """Records the error of a refused record, if it is the first one of this generation."""
        with self._lock:
            if self._error is None:
                self._on_error(error)
                self._error = error

    def _work(self) -> None:
        """Runs the worker thread. Hands queued records to the links in batches: each is one message and one answer."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._inbox) or self._closed)
                if self._closed:
                    return
            for item in self._waiting():
                self._work_on(item)
            for link in self.links.values():
                link.wake()
            self.changed()

    def _waiting(self) -> Iterator[Item]:
        """Yields records of the inbox, up to a message's bytes. Each is `_working` until the next one is requested."""
        size = 0
        while True:
            with self._lock:
                self._working = None
                if self._closed or not self._inbox or size >= BATCH_BYTES:
                    return
                item = self._working = self._inbox.popleft()
            size += item.body.nbytes
            yield item

    def _work_on(self, item: Item) -> None:
        error: SwiftError
        try:
            self._take(item)
            return
        except SwiftError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001  (a trainer must not wait for a dead worker)
            error = ServiceError(f"{item.stream} {item.key} cannot be logged: {raised!r}")
        self.refuse(error)
        item.outcome = "refused"

    def _take(self, item: Item) -> None:
        """Compares a record, sends it, or both."""
        digest = digest_of(item.dtype, item.shape, item.body)
        with self._lock:
            logged = self._known.setdefault(item.stream, {}).setdefault(item.key, _Known(digest))
            missing = self._missing(item, logged)
        if logged.digest != digest and not item.sent_before:
            raise Divergence(differs_words(item.stream, item.key, logged.digest, digest))
        if not missing:
            item.outcome = "equal"
            return
        codec, stored = compress(self._codec, item.body, DTYPE_BY_NAME[item.dtype].width)
        item.stored_bytes = len(stored)
        framed = functools.partial(
            item.framed,
            stream=item.stream,
            key=item.key,
            dtype=item.dtype,
            shape=item.shape,
            raw_bytes=item.body.nbytes,
            codec=CODECS[codec],
            stored=stored,
            body_crc=checksum(stored),
            digest=digest,
        )
        with self._lock:  # more may be known of the servers by now
            known = self._known.setdefault(item.stream, {}).setdefault(item.key, logged)
            missing = self._missing(item, known)
            copied = bool(known.servers) and not item.sent_before
            for server in missing:
                self.links[server].enqueue(framed(server))
            known.servers.update(missing)
            item.sent_to = missing
            item.outcome = "copied" if copied else "sent"  # last: a reader that sees it uses `sent_to`

    def _missing(self, item: Item, known: _Known) -> tuple[str, ...]:
        return tuple(s for s in self.servers if s in item.sent_before or s not in known.servers)
