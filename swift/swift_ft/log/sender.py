"""Delivery of a writer's queue: records are digested, compared with those in the log, compressed and sent.

    (its writer)  ``put(item)`` → (worker) digest → compare → compress → (a link per server) send → (server) acknowledge
    (observer)    ``on_change`` after every batch and every answer, ``on_error`` when a record is refused

A record goes to every server, each of which assigns its own sequence, and is held until all have acknowledged it.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import grpc

from swift_ft._pb import log_pb2
from swift_ft.errors import (
    Divergence,
    LogUnavailable,
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

# Counters of a writer of the log.


@dataclass(slots=True)
class WriterStats:
    """Counts since the writer was created."""

    records: int = 0
    """Records handed over to be sent."""
    bytes: int = 0
    """Raw bytes of these records."""
    stored_bytes: int = 0
    """Bytes of these records after compression."""
    verified: int = 0
    """Records that the log already had, found equal."""
    resent: int = 0
    """Records sent again after a lost connection or a fence."""
    blocked_seconds: float = 0.0
    """Total seconds that `append` waited because the queue was full."""
    dropped_records: int = 0
    """Records not logged because the queue was full (when_full="drop")."""
    dropped_bytes: int = 0
    pace_bytes_per_s: float = 0.0
    """Raw bytes per second that the slowest log server acknowledged lately, while it was busy; 0: not known yet."""


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
    """Connection of one writer to one server, for all its streams."""

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
        """Returns the error to report to the writer's caller, or None."""
        with self._cond:
            return self._core.error(patience_s, time.monotonic())

    def set_generation(self, generation: int, discard: bool) -> int:
        """Reopens all streams under the generation. Returns the bytes freed by ``discard``."""
        with self._cond:
            freed = self._core.set_generation(generation, discard, time.monotonic())
            self._cancel_call()
            return freed

    def take_pending(self) -> list[Outgoing]:
        """Ends sending. Returns the unacknowledged records, in order."""
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


OVERHEAD_BYTES = 512
"""Bytes that a queued record counts for in addition to its body, so that empty tensors count too."""


def _framed(server: str, **fields: Any) -> Outgoing:
    """Returns the copy of a record for one server."""
    return Outgoing(**fields)


@dataclass(slots=True, eq=False)
class Item:
    """A record in the queue, and its outcome."""

    stream: str
    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    body: memoryview
    framed: Callable[..., Outgoing] = _framed
    sent_before: Collection[str] = ()
    """Servers that a killed writer has sent it to: it is sent there again whatever they hold."""
    stored_bytes: int = 0
    """Bytes of the body after compression."""
    sent_to: tuple[str, ...] = ()
    """Servers whose links it was handed to."""
    outcome: str = ""
    """Result of the worker: "sent", "copied" (only to servers that lacked it), "equal" or "refused"."""

    @property
    def held_bytes(self) -> int:
        """Bytes that it counts for while queued, and that each copy counts for until it is acknowledged."""
        return self.body.nbytes + OVERHEAD_BYTES


class Observer(Protocol):
    """Listener of a delivery. The delivery's threads call it, never before the first `put`."""

    def on_change(self) -> None:
        """(without the lock) Called when records were compared, sent or acknowledged, or a call to a server ended."""

    def on_error(self, error: SwiftError) -> None:
        """(holding the lock) Called for the first refused record of a generation, before `error` shows it."""


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
        codec: str | Mapping[str, str],
        fsync: str | Mapping[str, str],
        patience_s: float,
        name: str,
        observer: Observer,
        lock: threading.Condition,
    ) -> None:
        """The options are those of `swift_ft.log.writer.LogWriter`. ``lock`` guards the queue and the writer's own
        state. Threads that wait on it are notified after every change."""
        self._lock = lock
        self.servers = tuple(dict.fromkeys(servers))
        """Servers that keep the streams."""
        self.stats = WriterStats()
        self.held_bytes = 0
        """Bytes that are queued or not yet acknowledged, counted per copy."""
        self.patience_s = patience_s
        """Seconds without an acknowledgement by a server after which that is an error."""
        self._job = job
        self._generation = generation
        self._name = name or job
        self._observer = observer
        self._inbox: deque[Item] = deque()
        self._working: Item | None = None
        self._known: dict[str, dict[RecordKey, _Known]] = {}
        self._error: SwiftError | None = None
        self._closed = False
        check_codec(codec)
        self._codec: Callable[[str], str] = (
            (lambda stream: codec.get(stream, "none")) if isinstance(codec, Mapping) else lambda _: codec
        )
        self._fsync = (
            (lambda stream: fsync.get(stream, "")) if isinstance(fsync, Mapping) else lambda _: fsync
        )
        self.links = {address: self._link(address) for address in self.servers}
        """Link of each server. The dict is replaced, never modified."""
        self._resent = 0  # by links that were closed
        self._worker = threading.Thread(target=self._work, name=f"log-writer-{self._name}", daemon=True)
        self._worker.start()

    # -- its writer's side ------------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        """Appends a record to the queue."""
        with self._lock:
            self.held_bytes += item.held_bytes
            self._inbox.append(item)
            self._lock.notify_all()

    @property
    def handed_over(self) -> bool:
        """Returns whether the worker is done: all unacknowledged records are with the links."""
        return not self._inbox and self._working is None

    @property
    def error(self) -> SwiftError | None:
        """Error of the first refused record, until the next generation."""
        return self._error

    def trouble(self, *, may_drop: bool = False) -> SwiftError | None:
        """Returns the error to report to the writer's caller. ``may_drop``: ignores LogUnavailable of the links."""
        if self._error is not None:
            return self._error
        for link in self.links.values():
            error = link.error(self.patience_s)
            if error is not None and not (may_drop and isinstance(error, LogUnavailable)):
                return error
        return None

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """As `LogWriter.expect`."""
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

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        """As `LogWriter.set_generation`."""
        self._begin(generation, False, servers, emptied)

    def restart(self, generation: int) -> None:
        """As `LogWriter.restart`."""
        self._begin(generation, True)

    def _begin(
        self, generation: int, discard: bool, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        with self._lock:
            if generation < self._generation:
                raise UsageError(f"generation {generation} is older than {self._generation}")
            if discard:
                self.held_bytes -= sum(item.held_bytes for item in self._inbox)
                self._inbox.clear()
                self._lock.wait_for(lambda: self._working is None)
            self._generation = generation
            left = self._move(tuple(dict.fromkeys(servers)), emptied) if servers else []
            for link in self.links.values():
                self.held_bytes -= link.set_generation(generation, discard)
            if discard:
                self._known.clear()
            self._error = None
            self._lock.notify_all()
        for link in left:
            link.close()

    def _link(self, address: str) -> Link:
        return Link(address, self._job, self._generation, self._name, self.changed, self._fsync)

    def _move(self, servers: tuple[str, ...], emptied: Collection[str]) -> list[Link]:
        """(holding the lock) Switches to these servers. Returns the old links, to be closed."""
        stay = set(servers) - set(emptied)
        gone = [link for address, link in self.links.items() if address not in stay]
        kept = {address: link for address, link in self.links.items() if address in stay}
        new = [address for address in servers if address not in kept]
        self.links = kept | {address: self._link(address) for address in new}
        self.servers = servers
        for known in self._known.values():
            for record in known.values():
                record.servers &= stay
        left: dict[tuple[str, RecordKey], Outgoing] = {}
        for link in gone:
            self._resent += link.resent
            for pending in link.take_pending():
                self.held_bytes -= pending.held_bytes
                left.setdefault((pending.stream, pending.key), pending)
        for (stream, key), pending in left.items():
            # The servers that stay have it, or it is being sent to them. Its key may be forgotten already.
            had = self._known.get(stream, {}).get(key)
            for server in new:
                if had is None or server not in had.servers:
                    self._enqueue(server, replace(pending, sequence=-1))
                if had is not None:
                    had.servers.add(server)
        return gone

    def close(self) -> None:
        """Ends the threads and gives up unacknowledged records."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._worker.join(5.0)
        for link in self.links.values():
            link.close()

    # -- the background ---------------------------------------------------------------------------------

    def changed(self, freed: int = 0) -> None:
        """(any thread) Updates the counters and notifies the observer. ``freed``: bytes acknowledged or compared."""
        pace = self._pace()
        with self._lock:
            self.stats.pace_bytes_per_s = pace or self.stats.pace_bytes_per_s
            self.held_bytes -= freed
            self.stats.resent = self._resent + sum(link.resent for link in self.links.values())
            self._lock.notify_all()
        self._observer.on_change()

    def refuse(self, error: SwiftError) -> None:
        """Records the error of a refused record, if it is the first one of this generation."""
        with self._lock:
            if self._error is None:
                self._observer.on_error(error)
                self._error = error

    def _work(self) -> None:
        """Runs the worker thread. Hands queued records to the links in batches: each is one message and one answer."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._inbox) or self._closed)
                if self._closed:
                    return
            freed = sum(map(self._work_on, self._waiting()))
            with self._lock:
                links = list(self.links.values())
            for link in links:
                link.wake()
            self.changed(freed)

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

    def _work_on(self, item: Item) -> int:
        """Processes a record; an error refuses it. Returns the bytes that it frees in the queue."""
        error: SwiftError
        try:
            return self._take(item)
        except SwiftError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001  (appending threads must not wait for a dead worker)
            error = ServiceError(f"{item.stream} {item.key} cannot be logged: {raised!r}")
        self.refuse(error)
        item.outcome = "refused"
        return item.held_bytes

    def _take(self, item: Item) -> int:
        """Compares a record, sends it, or both. Returns the bytes that it frees; each copy sent counts separately."""
        digest = digest_of(item.dtype, item.shape, item.body)
        with self._lock:
            logged = self._known.setdefault(item.stream, {}).setdefault(item.key, _Known(digest))
            missing = self._missing(item, logged)
        if logged.digest != digest and not item.sent_before:
            raise Divergence(differs_words(item.stream, item.key, logged.digest, digest))
        if not missing:
            self.stats.verified += 1
            item.outcome = "equal"
            return item.held_bytes
        codec, stored = compress(self._codec(item.stream), item.body, DTYPE_BY_NAME[item.dtype].width)
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
            held_bytes=item.held_bytes,
        )
        with self._lock:  # the servers may have changed meanwhile
            known = self._known.setdefault(item.stream, {}).setdefault(item.key, logged)
            missing = self._missing(item, known)
            copied = bool(known.servers) and not item.sent_before
            for server in missing:
                self._enqueue(server, framed(server))
            known.servers.update(missing)
            if copied:
                self.stats.verified += 1  # and a missing copy is restored
            else:
                self.stats.records += 1
                self.stats.bytes += item.body.nbytes
                self.stats.stored_bytes += item.stored_bytes
            item.sent_to = missing
            item.outcome = "copied" if copied else "sent"  # last: a reader that sees it uses `sent_to`
        return item.held_bytes

    def _missing(self, item: Item, known: _Known) -> tuple[str, ...]:
        """Returns the servers that the record must be sent to."""
        return tuple(s for s in self.servers if s in item.sent_before or s not in known.servers)

    def _enqueue(self, server: str, record: Outgoing) -> None:
        """(holding the lock) Hands a record to a server's link and counts its bytes."""
        if self.links[server].enqueue(record):
            self.held_bytes += record.held_bytes

    def _pace(self) -> float | None:
        """Returns the pace of the slowest link, because a record is durable only when all servers have it."""
        with self._lock:
            links = list(self.links.values())
        return min((pace for pace in (link.pace() for link in links) if pace is not None), default=None)
