"""The writing end of the log, in a rank: `LogWriter`, whose queue is in this process."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from swift_ft.errors import LogInterrupted, ServiceError, SwiftError, UsageError
from swift_ft.log.codec import check_codec
from swift_ft.log.frame import BODY_BYTES_MAX, raw_bytes_of
from swift_ft.log.placement import PATIENCE_S
from swift_ft.log.protocol import Fsync
from swift_ft.log.record import (
    DIMS_MAX,
    DTYPE_BY_NAME,
    MARK_DTYPE,
    MARK_SHAPE,
    MARK_SLOT,
    WHEN_FULL,
    RecordKey,
    Unlogged,
    as_bytes,
    check_name,
)
from swift_ft.log.ring import Memory, Producer
from swift_ft.log.sender import Delivery, Item, WriterStats

# Bodies that a writer with a ring reads after the call: lent by the caller, or written by a borrower of the ring.


class Borrower(Protocol):
    """Component that writes bodies into a ring itself."""

    def finish(self) -> None:
        """(a flush, a full ring) Waits until all bodies in progress are written."""

    def let_go(self) -> None:
        """(the writer is closed) Waits until the borrower has stopped writing."""


class _Nobody:
    def finish(self) -> None: ...

    def let_go(self) -> None: ...


NOBODY: Borrower = _Nobody()
"""Placeholder while the ring has no borrower."""


class Lending(Protocol):
    """A writer with a ring. A native thread or a device may read a body after the call."""

    @property
    def copied(self) -> int:
        """Ring position below which all bodies are copied, so that the caller may reuse them."""

    def append_at(
        self,
        stream: str,
        key: RecordKey,
        dtype: str,
        shape: tuple[int, ...],
        address: int,
        size: int,
        now: bool = False,
        keep: bool = False,
    ) -> int:
        """As `Writer.append`, for ``size`` bytes at an address. Returns the position that `copied` will pass, or -1 if
        the record was dropped. ``now``: the bytes are copied before this returns."""

    def wait_copied(self) -> None:
        """Waits until all appended bodies are copied, so that the caller may reuse them. Never waits for the log."""

    def lend_ring(self, borrower: Borrower) -> tuple[Memory, Producer]:
        """Lends the ring to a borrower that writes bodies itself, appended at address 0. Only one is allowed."""


_POLL_S = 0.25


def check_options(
    servers: Sequence[str],
    job: str,
    codec: str | Mapping[str, str],
    fsync: str | Mapping[str, str],
    queue_bytes: int,
    patience_s: float,
    when_full: str,
) -> None:
    """Validates a writer's options. Raises UsageError, and ServiceError if a codec is not installed."""
    if not servers:
        raise UsageError("a log writer needs at least one log server")
    if queue_bytes < 1 or patience_s <= 0:
        raise UsageError("queue_bytes and patience_s must be positive")
    check_name("job", job)
    check_codec(codec)
    for policy in [fsync] if isinstance(fsync, str) else fsync.values():
        if policy not in ("", *Fsync):
            raise UsageError(f"fsync {policy!r} is not known; give one of {', '.join(Fsync)}")
    if when_full not in WHEN_FULL:
        raise UsageError(f"when_full {when_full!r} is not known; give one of {', '.join(WHEN_FULL)}")


def check_record(
    stream: str, key: RecordKey, dtype: str, shape: tuple[int, ...], body: memoryview | bytes | bytearray
) -> memoryview:
    """Validates a record and returns its body as bytes. Raises UsageError for an invalid stream name, element type,
    shape or key, or for a body of the wrong size."""
    check_name("stream", stream)
    if dtype not in DTYPE_BY_NAME:
        raise UsageError(f"{stream} {key}: element type {dtype!r} cannot be logged")
    if len(shape) > DIMS_MAX:
        raise UsageError(f"{stream} {key}: {len(shape)} dimensions; at most {DIMS_MAX} can be logged")
    if not (0 <= key.step < 1 << 63 and 0 <= key.microbatch < 1 << 32 and 0 <= key.slot < MARK_SLOT):
        raise UsageError(f"{stream} {key}: out of range")
    view = as_bytes(body)
    expected = raw_bytes_of(dtype, shape)
    if min(shape, default=0) < 0 or view.nbytes != expected:
        raise UsageError(f"{stream} {key}: {dtype} {list(shape)} takes {expected} bytes, not {view.nbytes}")
    if view.nbytes > BODY_BYTES_MAX:
        raise UsageError(
            f"{stream} {key}: {view.nbytes} bytes are more than a record can have ({BODY_BYTES_MAX})"
        )
    return view


class _Refusals:
    """Observer of a delivery that keeps the errors of refused records in `Unlogged`."""

    def __init__(self, unlogged: Unlogged) -> None:
        self._unlogged = unlogged

    def on_change(self) -> None:
        """Does no work: the delivery's lock already wakes threads that wait for a change."""

    def on_error(self, error: SwiftError) -> None:
        self._unlogged.refuse(error)


class LogWriter:
    """Writer of all streams of one rank, over one Append call to each of the servers that keep a copy.

    Call sequence::

        (coordinator)    admin.fence(server, job, generation)            grants the generation
        (a rank)         writer = LogWriter(servers, job, generation)
        (a replaying one)writer.expect(stream, reader.digests(stream, from_step), server)
        (every tensor)   writer.append(stream, key, dtype, shape, body)  returns at once
        (a failure)      writer.interrupt()                              frees a blocked append
        (after a fence)  writer.set_generation(g)                        sends again what was not acked
        (a report)       writer.flush(timeout_s)                         all of it is durable
        (a checkpoint)   writer.forget_below(step)

    One thread digests, compares and compresses; one thread per server sends. A record goes to every server, each of
    which assigns its own sequence, and is held until all have acknowledged it. At most ``queue_bytes`` are queued.
    Records that are sent and not acknowledged count, once per copy. Then `append` blocks, or with ``when_full="drop"``
    drops the record and declares its step unlogged (`swift_ft.log.record`).

    A server may be killed and restarted on the same address and directory without loss or duplicates. When other
    servers replace it (`set_generation`), they receive the records that it had not acknowledged, and those that are
    appended again. After ``patience_s`` without an acknowledgement `append` and `flush` raise LogUnavailable, until the
    log makes progress.
    """

    lending = None
    pid = None

    def __init__(
        self,
        servers: Sequence[str],
        job: str,
        generation: int,
        *,
        codec: str | Mapping[str, str] = "none",
        fsync: str | Mapping[str, str] = "",
        queue_bytes: int = 256 << 20,
        patience_s: float = PATIENCE_S,
        when_full: str = "block",
        name: str = "",
    ) -> None:
        """``codec``: "none", "lz4" or "bitshuffle" for all streams, or by stream name (default "none"). ``fsync``: when
        a record counts as durable ("always", "interval", "never"), for all streams or by stream name; empty: the
        server's default."""
        check_options(servers, job, codec, fsync, queue_bytes, patience_s, when_full)
        self.drops = when_full == "drop"
        lock = threading.Condition()
        self.unlogged = Unlogged(lock)
        self.delivery = Delivery(
            servers,
            job,
            generation,
            codec=codec,
            fsync=fsync,
            patience_s=patience_s,
            name=name,
            observer=_Refusals(self.unlogged),
            lock=lock,
        )
        """Queue, and the threads that process it."""
        self._lock = lock
        self._queue_bytes = queue_bytes
        self._interrupted = False
        self._closed = False

    @property
    def stats(self) -> WriterStats:
        """Counts since the writer was created."""
        return self.delivery.stats

    @property
    def queued_bytes(self) -> int:
        """Bytes that are queued or not yet acknowledged."""
        return self.delivery.held_bytes

    def append(
        self,
        stream: str,
        key: RecordKey,
        dtype: str,
        shape: tuple[int, ...],
        body: memoryview | bytes | bytearray,
        *,
        keep: bool = False,
    ) -> bool:
        """Appends a tensor. Returns at once unless the queue is full. Returns False if the record was dropped; with
        ``keep`` it never is (a replay: other ranks wait for the record).

        ``body`` must not change afterwards. A key that the stream has already (appended before by this writer, or
        declared by `expect`) is compared and not sent. Raises errors from the background: Divergence (names stream,
        step, microbatch and slot), SequenceConflict, LogUnavailable (unless the record may be dropped). Raises
        LogInterrupted after `interrupt`, and UsageError for a body that does not match dtype and shape.
        """
        item = Item(stream, key, dtype, shape, check_record(stream, key, dtype, shape, body))
        may_drop = self.drops and not keep
        with self._lock:
            self._raise_pending(may_drop)
            held, unlogged, stats = self.delivery.held_bytes, self.unlogged, self.stats
            full = held > 0 and held + item.held_bytes > self._queue_bytes
            if may_drop and (full or unlogged.refuses(stream, key.step, held, self._queue_bytes)):
                unlogged.drop(stream, key.step, item.body.nbytes)
                stats.dropped_records, stats.dropped_bytes = unlogged.records, unlogged.bytes
                return False
            if full:
                self._wait_for_room(item.held_bytes)
            self._declare(stream)
            self.delivery.put(item)
        return True

    def _wait_for_room(self, needed: int) -> None:
        """(holding the lock) Waits until `needed` bytes fit into the queue, or the queue is empty."""
        began = time.monotonic()
        try:
            while self.delivery.held_bytes and self.delivery.held_bytes + needed > self._queue_bytes:
                self._lock.wait(_POLL_S)
                self._raise_pending()
        finally:
            self.stats.blocked_seconds += time.monotonic() - began

    def declare(self) -> None:
        """Puts the marks that are due into the queue, and does not wait for the log. Raises as `append` does."""
        with self._lock:
            for stream in self.unlogged.streams:
                self._raise_pending()
                self._declare(stream)

    def _declare(self, stream: str) -> None:
        """(holding the lock) Queues the stream's due mark, if any, before its next record. A mark ignores the queue's
        limit: it is tiny, and a stream has at most one due."""
        due = self.unlogged.due(stream)
        if due is not None:
            self.delivery.put(Item(stream, due, MARK_DTYPE, MARK_SHAPE, memoryview(b"")))
            self.unlogged.marked(stream)

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """Declares records that one server (or every one) holds of a stream: these keys are compared, not sent there.

        Raises RecordCorrupt if another copy has a different record under one of these keys.
        """
        self.delivery.expect(stream, digests, server)

    def flush(self, timeout_s: float) -> None:
        """Waits until everything appended is durable. Raises as `append` does, and ServiceError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self.declare()
            while True:
                self._raise_pending()
                if self.delivery.handed_over and not self.delivery.held_bytes:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ServiceError(
                        f"the log has not acknowledged everything within {timeout_s:g} s: "
                        f"{self.delivery.held_bytes} bytes are under way"
                    )
                self._lock.wait(min(left, _POLL_S))

    def await_ready(self) -> None:
        """Returns at once: this writer is ready when created."""

    def interrupt(self) -> None:
        """Makes blocked and later calls of append and flush raise LogInterrupted, until set_generation."""
        with self._lock:
            self._interrupted = True
            self._lock.notify_all()

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        """(after a fence) Continues under the new generation: reopens streams, resends unacknowledged records, clears
        pending errors. ``servers``: the servers that keep the streams from now on (empty: unchanged); connections to
        others are closed. ``emptied``: those of them that were restarted without their data."""
        self._raise_closed()
        with self._lock:
            # First: an interrupt that arrives while old links are closed belongs to a newer generation.
            self._interrupted = False
        self.delivery.set_generation(generation, servers, emptied)

    def restart(self, generation: int) -> None:
        """(after a fence and admin.reset: all ranks restore a checkpoint) As set_generation, but drops unacknowledged
        records and all knowledge of the log's content."""
        self._raise_closed()
        with self._lock:
            self.delivery.restart(generation)
            self.unlogged.forget()
            self._interrupted = False

    def forget_below(self, step: int) -> None:
        """Forgets the keys of older steps, which will not be appended again."""
        self.delivery.forget_below(step)

    def close(self, flush_timeout_s: float = 10.0) -> None:
        """Flushes and ends the threads. Raises the errors of `flush`, after ending them."""
        try:
            if flush_timeout_s > 0 and not self._closed:
                self.flush(flush_timeout_s)
        finally:
            with self._lock:
                self._closed = True
                self._lock.notify_all()
            self.delivery.close()

    def _raise_closed(self) -> None:
        if self._closed:
            raise ServiceError("this log writer is closed")

    def _raise_pending(self, may_drop: bool = False) -> None:
        """Raises if closed or interrupted, and the pending error. ``may_drop``: ignores LogUnavailable."""
        self._raise_closed()
        if self._interrupted:
            raise LogInterrupted("the log writer was interrupted: a new generation is being formed")
        error = self.delivery.trouble(may_drop=may_drop)
        if error is not None:
            raise error
