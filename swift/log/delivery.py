"""What is behind the queue of a writer: a record is digested, compared with what the log has, compressed and sent.

    (its writer)  ``put(item)`` → (worker) digest → compare → compress → (a link per server) send → (server) acknowledge
    (observer)    ``on_change`` after every batch and every answer, ``on_error`` when nothing more goes out

A record goes to every server, each of which numbers it by itself, and is held until all have acknowledged it.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from swift.errors import Divergence, LogUnavailable, RecordCorrupt, ServiceError, SwiftError, UsageError
from swift.log.choice import Choice, LinkRate
from swift.log.difference import differs_words
from swift.log.frame import CODECS, checksum
from swift.log.link import Link
from swift.log.link_core import BATCH_BYTES, Outgoing
from swift.log.packing import Packer
from swift.log.record import RecordKey, check_name, digest_of
from swift.log.stats import WriterStats

OVERHEAD_BYTES = 512
"""Of a queued record besides its body, so that empty tensors count too."""


def _framed(server: str, **fields: Any) -> Outgoing:
    """The copy of a record that goes to a server."""
    return Outgoing(**fields)


@dataclass(slots=True, eq=False)
class Item:
    """A record in the queue, and what has become of it."""

    stream: str
    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    body: memoryview
    framed: Callable[..., Outgoing] = _framed
    sent_before: Collection[str] = ()
    """The servers that a writer that was killed has sent it to: it is sent there again whatever they hold."""
    stored_bytes: int = 0
    """What the codec has made of it."""
    sent_to: tuple[str, ...] = ()
    """The servers whose links it was handed to."""
    outcome: str = ""
    """What the worker has made of it: "sent", "copied" (only to servers that lacked it), "equal", "refused"."""

    @property
    def held_bytes(self) -> int:
        """What it counts for while it waits, and each of its copies until it is acknowledged."""
        return self.body.nbytes + OVERHEAD_BYTES


class Observer(Protocol):
    """Whom a delivery tells what happens, from threads of its own. Nothing is told before the first `put`."""

    def on_change(self) -> None:
        """(without the lock) Something was compared, sent or acknowledged, or a call to a server has ended."""

    def on_error(self, error: SwiftError) -> None:
        """(holding the lock) A record was refused; before anybody can see it in `error`. The first one of a
        generation."""

    def on_choice(self, stream: str, choice: Choice) -> None:
        """What the codec "auto" does with a stream from here on."""


@dataclass(slots=True)
class _Known:
    """A record that the log has, or that is on its way there."""

    digest: bytes
    servers: set[str] = field(default_factory=set)
    """That hold it, or are being sent it."""


class Delivery:
    """One worker thread, and a link to each of the servers that keep a copy."""

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
        """The options are those of `swift.log.writer.LogWriter`. ``lock`` guards the queue, and what the writer keeps
        beside it; whoever waits on it is woken after every change."""
        self._lock = lock
        self.servers = tuple(dict.fromkeys(servers))
        """Those that keep the streams."""
        self.stats = WriterStats()
        self.held_bytes = 0
        """What waits, and what is not acknowledged yet, each copy for itself."""
        self.patience_s = patience_s
        """So long a server may acknowledge nothing before that is an error."""
        self._job = job
        self._generation = generation
        self._name = name or job
        self._observer = observer
        self._packer = Packer(codec, observer.on_choice)
        self._inbox: deque[Item] = deque()
        self._working: Item | None = None
        self._known: dict[str, dict[RecordKey, _Known]] = {}
        self._error: SwiftError | None = None
        self._closed = False
        self._fsync = (
            (lambda stream: fsync.get(stream, "")) if isinstance(fsync, Mapping) else lambda _: fsync
        )
        self.links = {address: self._link(address) for address in self.servers}
        """By server. Replaced whole."""
        self._resent = 0  # by links that are gone
        self._worker = threading.Thread(target=self._work, name=f"log-writer-{self._name}", daemon=True)
        self._worker.start()

    @property
    def codec_choices(self) -> dict[str, Choice]:
        """What "auto" does at present, by stream, and why."""
        return dict(self._packer.choices)

    # -- its writer's side ------------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        """At the end of the queue."""
        with self._lock:
            self.held_bytes += item.held_bytes
            self._inbox.append(item)
            self._lock.notify_all()

    @property
    def handed_over(self) -> bool:
        """Nothing waits for the worker: what is not acknowledged yet is with the links."""
        return not self._inbox and self._working is None

    @property
    def error(self) -> SwiftError | None:
        """Why a record was refused, until the next generation."""
        return self._error

    def trouble(self, *, may_drop: bool = False) -> SwiftError | None:
        """What the writer's caller must be told now. ``may_drop``: a log that takes nothing is no reason."""
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
        """One whose copy cannot be asked is taken to hold what others hold: nothing is written over it."""
        with self._lock:
            for record in self._known.get(stream, {}).values():
                record.servers.add(server)

    def forget_below(self, step: int) -> None:
        """Keys of older steps will not come again."""
        with self._lock:
            # What still waits to be compared keeps what it is compared with.
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
        """(holding the lock) From now on these servers keep the streams. Gives the old links, to be closed."""
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
            # The servers that stay have it, or are being sent it: its key may be forgotten already.
            had = self._known.get(stream, {}).get(key)
            for server in new:
                if had is None or server not in had.servers:
                    self._enqueue(server, replace(pending, sequence=-1))
                if had is not None:
                    had.servers.add(server)
        return gone

    def close(self) -> None:
        """Ends the threads; what was not acknowledged is given up."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._worker.join(5.0)
        for link in self.links.values():
            link.close()

    # -- the background ---------------------------------------------------------------------------------

    def changed(self, freed: int = 0) -> None:
        """(any thread) Counts anew, and tells the observer. ``freed``: bytes that are acknowledged or compared."""
        rate = self._rate()
        with self._lock:
            if rate is not None:
                self.stats.pace_bytes_per_s = rate.bytes_per_s * rate.raw_per_stored
            self.held_bytes -= freed
            self.stats.resent = self._resent + sum(link.resent for link in self.links.values())
            self._lock.notify_all()
        self._observer.on_change()

    def refuse(self, error: SwiftError) -> None:
        """A record cannot be logged: nothing is promised until the next generation."""
        with self._lock:
            if self._error is None:
                self._observer.on_error(error)
                self._error = error

    def _work(self) -> None:
        """What waits is handed to the links together: it goes out in one message, and comes back in one answer."""
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
        """What is in the inbox, up to a message's bytes. Each is `_working` until the next one is asked for."""
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
        """Gives the bytes that are free again."""
        error: SwiftError
        try:
            return self._take(item)
        except SwiftError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001  (whoever appends must not wait for a thread that is gone)
            error = ServiceError(f"{item.stream} {item.key} cannot be logged: {raised!r}")
        self.refuse(error)
        item.outcome = "refused"
        return item.held_bytes

    def _take(self, item: Item) -> int:
        """Verifies, sends, or both; gives the bytes that are free again: each copy is counted anew."""
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
        with self._lock:  # the servers may be others by now
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

    def _missing(self, item: Item, known: _Known) -> tuple[str, ...]:
        """The servers that are to be sent it."""
        return tuple(s for s in self.servers if s in item.sent_before or s not in known.servers)

    def _enqueue(self, server: str, record: Outgoing) -> None:
        """(holding the lock)"""
        if self.links[server].enqueue(record):
            self.held_bytes += record.held_bytes

    def _rate(self) -> LinkRate | None:
        """Of the slowest link: a record is durable when all have it."""
        with self._lock:
            links = list(self.links.values())
        known = [rate for rate in (link.rate() for link in links) if rate is not None]
        return min(known, key=lambda rate: rate.bytes_per_s, default=None)
