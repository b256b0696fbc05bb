"""The writing end of the log, in a rank."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swift.errors import (
    Divergence,
    LogInterrupted,
    LogUnavailable,
    RecordCorrupt,
    ServiceError,
    SwiftError,
    UsageError,
)
from swift.log.choice import Choice, LinkRate
from swift.log.difference import differs_words
from swift.log.frame import BODY_BYTES_MAX, CODECS, checksum, raw_bytes_of
from swift.log.link import Link
from swift.log.link_core import BATCH_BYTES, Outgoing
from swift.log.packing import Packer, check_codec
from swift.log.placement import PATIENCE_S
from swift.log.record import DIMS_MAX, DTYPE_BY_NAME, RecordKey, as_bytes, check_name, digest_of
from swift.log.stats import WriterStats
from swift.log.unlogged import MARK_DTYPE, MARK_SHAPE, MARK_SLOT, WHEN_FULL, Declaring, Unlogged
from swift.log.wire import Fsync

_POLL_S = 0.25
_OVERHEAD_BYTES = 512  # of a queued record besides its body, so that empty tensors count too


def check_options(
    servers: Sequence[str],
    job: str,
    codec: str | Mapping[str, str],
    fsync: str | Mapping[str, str],
    queue_bytes: int,
    patience_s: float,
    when_full: str,
) -> None:
    """Of a writer. Raises UsageError, and ServiceError if a codec is not installed."""
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


def _framed(server: str, **fields: Any) -> Outgoing:
    """The copy of a record that goes to a server."""
    return Outgoing(**fields)


@dataclass(slots=True, eq=False)
class _Item:
    stream: str
    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    body: memoryview
    held_bytes: int
    framed: Callable[..., Outgoing] = _framed
    sent_before: Collection[str] = ()
    """The servers that a writer that was killed has sent it to: it is sent there again whatever they hold."""
    stored_bytes: int = 0
    """What the codec has made of it."""
    sent_to: tuple[str, ...] = ()
    """The servers whose links it was handed to."""
    outcome: str = ""
    """What the worker has made of it: "sent", "copied" (only to servers that lacked it), "equal", "refused"."""


@dataclass(slots=True)
class _Known:
    """A record that the log has, or that is on its way there."""

    digest: bytes
    servers: set[str] = field(default_factory=set)
    """That hold it, or are being sent it."""


class LogWriter(Declaring):
    """All streams that one rank writes, over one Append call to each of the servers that keep a copy.

    Call sequence::

        (coordinator)    admin.fence(server, job, generation)            grants the generation
        (a rank)         writer = LogWriter(servers, job, generation)
        (a replaying one)writer.expect(stream, reader.digests(stream, from_step), server)
        (every tensor)   writer.append(stream, key, dtype, shape, body)  returns at once
        (a failure)      writer.interrupt()                              frees a blocked append
        (after a fence)  writer.set_generation(g)                        sends again what was not acked
        (a report)       writer.flush(timeout_s)                         all of it is durable
        (a checkpoint)   writer.forget_below(step)

    One thread digests, compares and compresses; one per server sends. A record goes to every server, each of
    which numbers it by itself, and is held until all have acknowledged it. At most ``queue_bytes`` wait, counting
    what is sent and not acknowledged, each copy for itself; then `append` blocks, or with ``when_full="drop"`` drops
    the record and declares its step unlogged (`swift.log.unlogged`). A server may be killed and
    started again on the same address and directory: nothing is lost or doubled. One that is replaced by others
    (`set_generation`) leaves them what it had not acknowledged, and what of it comes again. After ``patience_s``
    without an acknowledgement `append` and `flush` raise LogUnavailable, until the log moves again.
    """

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
        """``codec``: "none", "lz4", "bitshuffle" or "auto" for all streams, or by stream name ("none" where it is
        not named). "auto" takes what pays against the bandwidth that is measured: see `swift.log.choice`.
        ``fsync``: when a record counts as durable ("always", "interval", "never"), likewise; empty: as the server
        says."""
        check_options(servers, job, codec, fsync, queue_bytes, patience_s, when_full)
        self.job = job
        self.generation = generation
        self.stats = WriterStats()
        self._servers = tuple(dict.fromkeys(servers))
        self._packer = Packer(codec, self._on_choice)
        self._queue_bytes = queue_bytes
        self._patience_s = patience_s
        self.drops = when_full == "drop"
        self._cond = threading.Condition()
        self._unlogged, self._unlogged_lock = Unlogged(), self._cond
        self._inbox: deque[_Item] = deque()
        self._held_bytes = 0
        self._working: _Item | None = None
        self._known: dict[str, dict[RecordKey, _Known]] = {}
        self._error: SwiftError | None = None
        self._interrupted = False
        self._closed = False
        self._name = name or job
        self._fsync = (
            (lambda stream: fsync.get(stream, "")) if isinstance(fsync, Mapping) else lambda _: fsync
        )
        self._links = {address: self._link(address) for address in self._servers}
        self._resent = 0  # by links that are gone
        self._worker = threading.Thread(target=self._work, name=f"log-writer-{name or job}", daemon=True)
        self._worker.start()

    @property
    def codec_choices(self) -> dict[str, Choice]:
        """What "auto" does at present, by stream, and why."""
        return dict(self._packer.choices)

    # -- the caller's side ----------------------------------------------------------------------------

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
        """Takes a tensor into the log. Returns at once, unless ``queue_bytes`` are waiting already. False: it was
        dropped; with ``keep`` it never is (a replay: others wait for the record).

        ``body`` must not change afterwards. A key that the stream has already (appended before by this
        writer, or declared by `expect`) is compared and not sent. Raises what went wrong in the background
        since: Divergence (stream, step, microbatch and slot named), SequenceConflict, LogUnavailable (not where
        records may be dropped); LogInterrupted after `interrupt`; UsageError for a body that is not this dtype and
        shape.
        """
        view = self._check(stream, key, dtype, shape, body)
        held = view.nbytes + _OVERHEAD_BYTES
        may_drop = self.drops and not keep
        with self._cond:
            self._raise_pending(may_drop)
            full = self._held_bytes > 0 and self._held_bytes + held > self._queue_bytes
            if may_drop and (
                full or self._unlogged.refuses(stream, key.step, self._held_bytes, self._queue_bytes)
            ):
                self._unlogged.drop(stream, key.step, view.nbytes)
                self.stats.dropped_records, self.stats.dropped_bytes = (
                    self._unlogged.records,
                    self._unlogged.bytes,
                )
                return False
            if full:
                self._wait_for_room(held)
            self._declare(stream)
            self._put(_Item(stream, key, dtype, shape, view, held))
        return True

    def _put(self, item: _Item) -> None:
        """(holding the lock)"""
        self._held_bytes += item.held_bytes
        self._inbox.append(item)
        self._cond.notify_all()

    def _declare(self, stream: str, wait: bool = True) -> bool:
        """(holding the lock) Puts the mark that is due, if one is, in front of what comes. It takes no room to speak
        of, and there is one of a stream at most."""
        due = self._unlogged.due(stream)
        if due is not None:
            self._put(_Item(stream, due, MARK_DTYPE, MARK_SHAPE, memoryview(b""), _OVERHEAD_BYTES))
            self._unlogged.marked(stream)
        return True

    def _wait_for_room(self, held: int) -> None:
        """(holding the lock)"""
        began = time.monotonic()
        try:
            while self._held_bytes and self._held_bytes + held > self._queue_bytes:
                self._cond.wait(_POLL_S)
                self._raise_pending()
        finally:
            self.stats.blocked_seconds += time.monotonic() - began

    @property
    def queued_bytes(self) -> int:
        """What waits and what is not acknowledged yet."""
        return self._held_bytes

    @staticmethod
    def _check(
        stream: str, key: RecordKey, dtype: str, shape: tuple[int, ...], body: memoryview | bytes | bytearray
    ) -> memoryview:
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
            raise UsageError(
                f"{stream} {key}: {dtype} {list(shape)} takes {expected} bytes, not {view.nbytes}"
            )
        if view.nbytes > BODY_BYTES_MAX:
            raise UsageError(
                f"{stream} {key}: {view.nbytes} bytes are more than a record can have ({BODY_BYTES_MAX})"
            )
        return view

    def settle(self) -> None:
        """Nothing was lent."""

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """Declares what one server, or every one, holds of a stream: these keys are compared, and not sent there.

        RecordCorrupt: another copy has another record under one of these keys.
        """
        check_name("stream", stream)
        with self._cond:
            known = self._known.setdefault(stream, {})
            for key, digest in digests.items():
                record = known.setdefault(key, _Known(digest))
                if record.digest != digest:
                    raise RecordCorrupt(
                        f"{stream} {key} differs between its copies ({record.digest.hex()}; on {server or 'others'} "
                        f"{digest.hex()})"
                    )
                record.servers.update([server] if server else self._servers)

    def flush(self, timeout_s: float) -> None:
        """Returns when everything appended is durable. Raises what `append` raises; ServiceError in time."""
        deadline = time.monotonic() + timeout_s
        with self._cond:
            self.declare()
            while True:
                self._raise_pending()
                if not self._inbox and self._working is None and not self._held_bytes:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ServiceError(
                        f"the log has not acknowledged everything within {timeout_s:g} s: "
                        f"{self._held_bytes} bytes are under way"
                    )
                self._cond.wait(min(left, _POLL_S))

    def interrupt(self) -> None:
        """Makes blocked and later calls of append and flush raise LogInterrupted, until set_generation."""
        with self._cond:
            self._interrupted = True
            self._cond.notify_all()

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        """(after a fence) Goes on under the new generation: streams are opened again, what was not acked is
        sent again. Pending errors are forgotten. ``servers``: those that keep the streams from now on; the
        others are not spoken to again. ``emptied``: those of them that have come anew, without what they had."""
        self._begin(generation, False, servers, emptied)

    def restart(self, generation: int) -> None:
        """(after a fence and admin.reset: everybody restores a checkpoint) As set_generation, but what was
        not acked is dropped, and so is all knowledge of what the log holds."""
        self._begin(generation, discard=True)

    def _begin(
        self, generation: int, discard: bool, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        with self._cond:
            if generation < self.generation:
                raise UsageError(f"generation {generation} is older than {self.generation}")
            if discard:
                self._held_bytes -= sum(item.held_bytes for item in self._inbox)
                self._inbox.clear()
                self._cond.wait_for(lambda: self._working is None)
            self.generation = generation
            left = self._move(tuple(dict.fromkeys(servers)), emptied) if servers else []
            for link in self._links.values():
                self._held_bytes -= link.set_generation(generation, discard)
            if discard:
                self._known.clear()
                self._unlogged.forget()
            self._error = None
            self._interrupted = False
            self._cond.notify_all()
        for link in left:
            link.close()

    def _link(self, address: str) -> Link:
        return Link(address, self.job, self.generation, self._name, self._on_change, self._fsync)

    def _move(self, servers: tuple[str, ...], emptied: Collection[str]) -> list[Link]:
        """(holding the lock) From now on these servers keep the streams. Gives the old links, to be closed."""
        stay = set(servers) - set(emptied)
        gone = [self._links.pop(address) for address in self._servers if address not in stay]
        new = [address for address in servers if address not in self._links]
        self._links |= {address: self._link(address) for address in new}
        self._servers = servers
        for known in self._known.values():
            for record in known.values():
                record.servers &= stay
        left: dict[tuple[str, RecordKey], Outgoing] = {}
        for link in gone:
            self._resent += link.resent
            for pending in link.take_pending():
                self._held_bytes -= pending.held_bytes
                left.setdefault((pending.stream, pending.key), pending)
        for (stream, key), pending in left.items():
            # The servers that stay have it, or are being sent it: its key may be forgotten already.
            had = self._known.get(stream, {}).get(key)
            for server in new:
                if had is None or server not in had.servers:
                    self._enqueue(server, replace(pending, sequence=-1))
                if had is not None:
                    had.servers.add(server)
        return gone

    def forget_below(self, step: int) -> None:
        """Keys of older steps will not come again."""
        with self._cond:
            # What still waits to be compared keeps what it is compared with.
            waiting = [*self._inbox, *([self._working] if self._working is not None else [])]
            step = min([step, *(item.key.step for item in waiting)])
            for stream, known in self._known.items():
                self._known[stream] = {key: value for key, value in known.items() if key.step >= step}

    def close(self, flush_timeout_s: float = 10.0) -> None:
        """Flushes and ends the threads. Raises what flush raises, after ending them."""
        try:
            if flush_timeout_s > 0 and not self._closed:
                self.flush(flush_timeout_s)
        finally:
            with self._cond:
                self._closed = True
                self._cond.notify_all()
            self._worker.join(5.0)
            for link in self._links.values():
                link.close()

    def _raise_pending(self, may_drop: bool = False) -> None:
        """``may_drop``: a log that takes nothing is no reason."""
        if self._closed:
            raise ServiceError("this log writer is closed")
        if self._interrupted:
            raise LogInterrupted("the log writer was interrupted: a new generation is being formed")
        if self._error is not None:
            raise self._error
        for link in self._links.values():
            error = link.error(self._patience_s)
            if error is not None and not (may_drop and isinstance(error, LogUnavailable)):
                raise error

    # -- the background ---------------------------------------------------------------------------------

    def _on_change(self, freed: int) -> None:
        rate = self._rate()
        with self._cond:
            if rate is not None:
                self.stats.pace_bytes_per_s = rate.bytes_per_s * rate.raw_per_stored
            self._held_bytes -= freed
            self.stats.resent = self._resent + sum(link.resent for link in self._links.values())
            self._cond.notify_all()

    def _on_error(self, error: SwiftError) -> None:
        with self._cond:
            self._error = self._error or self._refuse(error)

    def _on_choice(self, stream: str, choice: Choice) -> None:
        """What "auto" does with a stream from here on."""

    def _work(self) -> None:
        """What waits is handed to the links together: it goes out in one message, and comes back in one answer."""
        while True:
            with self._cond:
                self._cond.wait_for(lambda: bool(self._inbox) or self._closed)
                if self._closed:
                    return
            freed = sum(map(self._work_on, self._waiting()))
            with self._cond:
                links = list(self._links.values())
            for link in links:
                link.wake()
            self._on_change(freed)

    def _waiting(self) -> Iterator[_Item]:
        """What is in the inbox, up to a message's bytes. Each is `_working` until the next one is asked for."""
        size = 0
        while True:
            with self._cond:
                self._working = None
                if self._closed or not self._inbox or size >= BATCH_BYTES:
                    return
                item = self._working = self._inbox.popleft()
            size += item.body.nbytes
            yield item

    def _work_on(self, item: _Item) -> int:
        """Gives the bytes that are free again."""
        error: SwiftError
        try:
            return self._take(item)
        except SwiftError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001  (whoever appends must not wait for a thread that is gone)
            error = ServiceError(f"{item.stream} {item.key} cannot be logged: {raised!r}")
        self._on_error(error)
        item.outcome = "refused"
        return item.held_bytes

    def _take(self, item: _Item) -> int:
        """Verifies, sends, or both; gives the bytes that are free again: each copy is counted anew."""
        digest = digest_of(item.dtype, item.shape, item.body)
        with self._cond:
            logged = self._known.setdefault(item.stream, {}).setdefault(item.key, _Known(digest))
            missing = self._missing(item, logged)
        if logged.digest != digest and not item.sent_before:
            raise Divergence(differs_words(item.stream, item.key, logged.digest, digest))
        if not missing:
            self.stats.verified += 1
            item.outcome = "equal"
            return item.held_bytes
        codec, stored = self._packer.pack(item.stream, item.dtype, item.body, self._rate)
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
        with self._cond:  # the servers may be others by now
            known = self._known.setdefault(item.stream, {}).setdefault(item.key, logged)
            missing = self._missing(item, known)
            copied = bool(known.servers) and not item.sent_before
            for server in missing:
                self._enqueue(server, framed(server))
            known.servers.update(missing)
            if copied:
                self.stats.verified += 1  # and one copy is made good
            else:
                self.stats.records += 1
                self.stats.bytes += item.body.nbytes
                self.stats.stored_bytes += item.stored_bytes
            item.sent_to = missing
            item.outcome = "copied" if copied else "sent"  # last: whoever sees it goes by `sent_to`
        return item.held_bytes

    def _missing(self, item: _Item, known: _Known) -> tuple[str, ...]:
        """The servers that are to be sent it."""
        return tuple(s for s in self._servers if s in item.sent_before or s not in known.servers)

    def _enqueue(self, server: str, record: Outgoing) -> None:
        """(holding the lock)"""
        if self._links[server].enqueue(record):
            self._held_bytes += record.held_bytes

    def _rate(self) -> LinkRate | None:
        """Of the slowest link: a record is durable when all have it."""
        with self._cond:
            links = list(self._links.values())
        known = [rate for rate in (link.rate() for link in links) if rate is not None]
        return min(known, key=lambda rate: rate.bytes_per_s, default=None)
