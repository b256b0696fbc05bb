"""The writer of a sidecar: its queue is the ring that the trainer fills, and what is acknowledged leaves it."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift.errors import (
    LogUnavailable,
    RecordCorrupt,
    RecordTrimmed,
    ServiceError,
    StaleGeneration,
    SwiftError,
)
from swift.log.choice import Choice
from swift.log.delivery import Delivery, Item
from swift.log.link_core import BATCH_BYTES, Outgoing
from swift.log.placement import COPIES_MAX, PATIENCE_S
from swift.log.reader import LogReader
from swift.log.record import RecordKey
from swift.log.ring import STREAMS_MAX, Consumer, Counts, Memory, RingEntry, Word
from swift.log.sidecar_messages import Message, error_to_json

GATHER_S = 0.25
"""A step's records come one by one. Sent so, each costs ten threads a turn, here and at the server. So they wait for
others of their step, so long at most."""
_NAP_S = 0.02
_SLEEP_S = 0.1
_ASK_S = 1.0
_RETRY_S = 0.1


class _Placed(Outgoing):
    """A record whose sequence stands in the ring, before it is sent: a successor must give it the same one."""

    def __init__(self, entry: RingEntry, copy: int, **fields: Any) -> None:
        self._entry = entry
        self._copy = copy
        super().__init__(sequence=entry.sequence(copy), **fields)

    @property
    def sequence(self) -> int:
        return self._entry.sequence(self._copy)

    @sequence.setter
    def sequence(self, value: int) -> None:
        self._entry.set_sequence(self._copy, value)


class RingWriter:
    """Hands what is in the ring to a `Delivery`, and moves the ring's tail behind what all servers have.

    Its methods are called by the sidecar's threads; the delivery tells it of changes by ``on_change``, ``on_error`` and
    ``on_choice``.
    """

    def __init__(
        self,
        memory: Memory,
        wake: int,
        tell: Callable[[Message], None],
        dropped: int | None = None,
        *,
        over: Callable[[], bool],
        servers: Mapping[str, int],
        job: str,
        generation: int,
        codec: str | Mapping[str, str] = "none",
        fsync: str | Mapping[str, str] = "",
        patience_s: float = PATIENCE_S,
        name: str = "",
    ) -> None:
        """``tell`` sends a message to the trainer; it may be gone. ``dropped``: see `discard`; a predecessor has not
        done it, and what it left must not be claimed under the new generation. ``over``: nothing more is tried.
        ``servers``: address -> its number, another one each time that it has come."""
        self._memory = memory
        self._over = over
        self._consumer = Consumer(memory, wake)
        self._tell = tell
        self._pumping = threading.Lock()
        self._sweeping = threading.Lock()
        self._outstanding: deque[tuple[int, RingEntry | None, Item | None]] = deque()
        self._calling = threading.Event()  # somebody wants `_pumping`
        self._wanted = 0  # up to this position somebody waits
        self._asking: SwiftError | None = None
        self._names = [memory.stream(index) for index in range(STREAMS_MAX)]
        self._floor = 0
        self._resent_before = memory.load(Word.RESENT)
        if dropped is not None:
            self._drop(dropped)
        held = self._consumer.held()
        numbers = memory.assign(servers.values(), held)
        self._copies = {address: numbers[number] for address, number in servers.items()}
        self._lock = threading.Condition()
        self._job = job
        self._patience_s = patience_s
        self.delivery = Delivery(
            tuple(servers),
            job,
            generation,
            codec=codec,
            fsync=fsync,
            patience_s=patience_s,
            name=name,
            observer=self,
            lock=self._lock,
        )
        """What is behind the ring."""
        self._floor_at_start = min([memory.load(Word.FLOOR), *(entry.key.step for entry in held)])
        given = [self._resume(address, copy, held) for address, copy in self._copies.items()]
        resumed = memory.load(Word.TAIL) > 0 or any(given)
        self._unlearned = {
            name: list(servers) for name in (self._names if resumed else ()) if name
        }  # what a predecessor may have sent something of, and which servers are to say it
        self._damaged: dict[str, list[str]] = {}  # those that cannot

    def _resume(self, server: str, copy: int, held: Sequence[RingEntry]) -> bool:
        """Puts the streams where a predecessor left them; whether it has sent anything that is still in the ring."""
        given: dict[int, list[int]] = {}
        for entry in held:
            if entry.sequence(copy) >= 0:
                given.setdefault(entry.index, []).append(entry.sequence(copy))
        for index, name in enumerate(self._names):
            acked, sequences = self._memory.acked(index, copy), given.get(index, [])
            if name and (acked >= 0 or sequences):
                if acked < 0:  # nothing of it has left the ring: it was opened at the first of these
                    acked = sequences[0]
                following = max([acked, *(sequence + 1 for sequence in sequences)])
                self.delivery.links[server].resume(name, acked, following)
        return bool(given)

    # -- main -----------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Hands over what is in the ring, then sleeps until there is more, or for a moment."""
        if self._consumer.unread:
            self._gather()
        with self._pumping:
            while not self._calling.is_set() and self._take_next():
                pass
            # What the trainer had put in before, copied or not, is still compared.
            floor = self._memory.load(Word.FLOOR)
            if floor > self._floor and self._consumer.position >= self._memory.load(Word.FLOOR_AT):
                self.delivery.forget_below(floor)
                self._floor = floor
        self._consumer.sleep(_SLEEP_S)

    def _gather(self) -> None:
        """Waits for the rest of a step's records, unless there is much already or somebody waits for what there is."""
        load, consumer = self._memory.load, self._consumer
        enough = min(BATCH_BYTES, self._memory.capacity // 4)
        until = time.monotonic() + GATHER_S
        while not (load(Word.URGENT) or load(Word.PRODUCER_WAITS)):
            # The floor is moved at the end of a step: what lies below that place is of one that is done.
            wanted = max(self._wanted, load(Word.FLOOR_AT))
            if consumer.position < wanted or consumer.unread >= enough or time.monotonic() > until:
                return
            consumer.nap(_NAP_S)

    def want(self, position: int) -> None:
        """(any thread) Somebody waits for what lies below: nothing more is gathered in front of it."""
        self._wanted = max(self._wanted, position)
        self._consumer.wake()

    def _take_next(self) -> bool:
        before = self._consumer.position
        entry = self._consumer.next()
        if entry is None:
            return False
        if not isinstance(entry, RingEntry):
            with self._sweeping:
                self._outstanding.append((entry, None, None))
            self.delivery.changed()
            return True
        stream = self._names[entry.index] = self._names[entry.index] or self._memory.stream(entry.index)
        if stream in self._unlearned and not self._learn(stream):
            self._consumer.position = before  # somebody wants something first
            return False
        item = Item(stream, entry.key, entry.dtype, entry.shape, entry.body)
        item.framed = functools.partial(self._placed, entry)
        item.sent_before = [s for s, copy in self._copies.items() if entry.sequence(copy) >= 0]
        with self._sweeping:
            self._outstanding.append((entry.end, entry, item))
        self.delivery.put(item)
        return True

    def _placed(self, entry: RingEntry, server: str, **fields: Any) -> Outgoing:
        return _Placed(entry, self._copies[server], **fields)

    def _learn(self, stream: str) -> bool:
        """What a predecessor knew to be in the log, the servers are asked for. False: they have to be asked again.

        One whose copy is damaged is taken to hold what another one holds: nothing is written over what may be there.
        """
        reader = LogReader(self.delivery.servers, self._job)
        began = time.monotonic()
        from_step = self._floor_at_start
        left = self._unlearned[stream]
        damaged = self._damaged.setdefault(stream, [])
        try:
            while left and not (self._calling.is_set() or self._over()):
                try:
                    digests = reader.digests(
                        stream, from_step, left[0], timeout_s=_ASK_S, cancelled=self._over
                    )
                except SwiftError as error:
                    floor = self._memory.load(Word.FLOOR)
                    if isinstance(error, RecordTrimmed) and from_step < floor:
                        from_step = floor  # the older ones are not asked for any more
                        continue
                    if isinstance(error, RecordCorrupt) and len(damaged) + 1 < len(self.delivery.servers):
                        damaged.append(left.pop(0))
                        from_step = self._floor_at_start
                        continue
                    if not isinstance(error, LogUnavailable) or time.monotonic() - began > self._patience_s:
                        self._asking = error
                    time.sleep(_RETRY_S)
                    continue
                try:
                    self.delivery.expect(stream, digests, left[0])
                except SwiftError as error:
                    self._asking = error
                    time.sleep(_RETRY_S)
                    continue
                self._asking = None
                from_step = self._floor_at_start
                left.pop(0)
            if left:
                return False
            for server in damaged:
                self.delivery.expect_as_others(stream, server)
            del self._unlearned[stream]
            return True
        finally:
            reader.close()

    # -- what leaves the ring --------------------------------------------------------------------------

    def on_error(self, error: SwiftError) -> None:
        """(holding the lock) Before the record leaves the ring: if this process is killed, the trainer knows. And at
        once with what is kept here: a trainer that knows begins a new generation, in which the error must not come up
        again."""
        self._tell({"trouble": error_to_json(error), "final": True})

    def on_choice(self, stream: str, choice: Choice) -> None:
        self._tell({"stream": stream, "codec": choice.codec, "reason": choice.reason})

    def on_change(self) -> None:
        """Something is acknowledged, perhaps: it leaves the ring."""
        stats = self.delivery.stats
        with self._sweeping:
            self._memory.store(Word.RESENT, self._resent_before + stats.resent)
            self._memory.store(Word.PACE, int(stats.pace_bytes_per_s))
            room = self._sweep()
        with self._lock:
            self._lock.notify_all()
        if room:
            self._tell({"room": True})

    def look(self) -> None:
        """A record of several messages may be acknowledged before its last one is sent: nobody tells of it then."""
        self.delivery.changed()

    def _sweep(self) -> bool:
        """Moves the tail behind what is acknowledged. True if the trainer waits for that."""
        acked: dict[tuple[str, str], int] = {}
        position, records, size, stored, verified = -1, 0, 0, 0, 0
        while self._outstanding:
            end, entry, item = self._outstanding[0]
            if entry is not None and item is not None:
                if not item.outcome:
                    break  # it may be durable already, if a predecessor has sent it, but the worker reads it
                if not all(self._is_durable(entry, item.stream, server, acked) for server in item.sent_to):
                    break
                verified += item.outcome in ("equal", "copied")
                if item.outcome == "sent":
                    records, size = records + 1, size + entry.body.nbytes
                    stored += item.stored_bytes
            self._outstanding.popleft()
            position = end
        return position >= 0 and self._consumer.release(position, Counts(records, size, stored, verified))

    def _is_durable(
        self, entry: RingEntry, stream: str, server: str, acked: dict[tuple[str, str], int]
    ) -> bool:
        """On that server. ``acked``: what was found out about streams in this sweep."""
        copy, memory = self._copies[server], self._memory
        sequence = entry.sequence(copy)
        if (stream, server) not in acked:
            known = acked[stream, server] = self.delivery.links[server].acked(stream)
            if sequence >= 0 and known > memory.acked(entry.index, copy):
                memory.set_acked(entry.index, copy, known)
        return 0 <= sequence < acked[stream, server]

    # -- control --------------------------------------------------------------------------------------

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str) -> None:
        """What a server holds of a stream."""
        self.delivery.expect(stream, digests, server)

    def set_generation(self, generation: int) -> None:
        """Streams are opened again under it, what was not acknowledged is sent again, errors are forgotten."""
        self.delivery.set_generation(generation)

    def discard(self, generation: int, upto: int) -> None:
        """`restart`: everything below the position is dropped."""
        self._calling.set()
        try:
            with self._pumping:
                self._calling.clear()
                self.delivery.restart(generation)
                self._unlearned.clear()
                self._damaged.clear()
                self._asking = None
                with self._sweeping:
                    self._drop(upto)
        finally:
            self._calling.clear()
        self._tell({"room": True})

    def _drop(self, upto: int) -> None:
        """The server was reset: it need not have what it has acknowledged."""
        self._outstanding.clear()
        for index in range(STREAMS_MAX):
            for copy in range(COPIES_MAX):
                self._memory.set_acked(index, copy, -1)
        self._consumer.position = max(self._consumer.position, upto)
        self._consumer.release(self._consumer.position)

    def trouble(self) -> SwiftError | None:
        """What the trainer must be told now."""
        return self.delivery.error or self._asking or self.delivery.trouble()

    def flush_to(self, upto: int, timeout_s: float) -> None:
        """`flush`: returns when everything below the position has left the ring. Raises ServiceError if that takes
        too long, and what ails the log."""
        deadline = time.monotonic() + timeout_s
        self.want(upto)
        while True:
            # Looked at first: what goes wrong is said before it leaves.
            tail = self._memory.load(Word.TAIL)
            error = self.trouble()
            if error is not None:
                raise error
            if tail >= upto:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServiceError(
                    f"the log has not acknowledged everything within {timeout_s:g} s: "
                    f"{upto - tail} bytes are under way"
                )
            with self._lock:
                if self._memory.load(Word.TAIL) == tail:
                    self._lock.wait(min(left, _SLEEP_S))

    def drained(self) -> bool:
        """(the trainer is gone) Whether there is nothing that could still be done."""
        if self._memory.load(Word.TAIL) == self._memory.load(Word.HEAD) or self.delivery.error is not None:
            return True
        return any(isinstance(link.error(0.0), StaleGeneration) for link in self.delivery.links.values())
