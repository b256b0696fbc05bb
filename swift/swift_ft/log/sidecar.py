"""The sidecar: a child process of a trainer that sends the records in the trainer's ring to the log.

    (trainer)  SidecarWriter starts ``python -m swift_ft.log.sidecar`` with a socket, the ring and a pidfd of its own
    (main)     reads the ring: digests, compares and compresses records, and hands them to a link per server
    (links)    send records, and read the servers' acknowledgements
    (control)  answers the trainer's requests; when the trainer is gone, drains the ring and ends the process
    (watch)    reports to the trainer when the log has a problem, and when it has recovered

It may be killed at any time. Its successor reads the ring from the tail: records that have a sequence are sent again
under the same one, the others are compared with the servers' records. To change servers, the trainer kills it.

Requests and answers are lines of JSON: ``{"id": 3, "do": "flush", …}``, ``{"id": 3, "error": null}``; unsolicited
``{"trouble": …}`` and ``{"room": true}``. Requests with id 0 are not answered.
"""

import argparse
import json
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import crc32c
import grpc

from swift_ft import errors, events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.credentials import open_channel
from swift_ft.errors import (
    Divergence,
    LogUnavailable,
    RecordCorrupt,
    RecordTrimmed,
    ServiceError,
    StaleGeneration,
    SwiftError,
    UsageError,
)
from swift_ft.log.codec import check_codec, compress
from swift_ft.log.frame import CODECS
from swift_ft.log.memory import keep_freed_memory
from swift_ft.log.placement import COPIES_MAX, PATIENCE_S
from swift_ft.log.reader import LogReader
from swift_ft.log.record import DTYPE_BY_NAME, RecordKey, check_name, digest_of
from swift_ft.log.ring import STREAMS_MAX, Consumer, Counts, Memory, RingEntry, Word
from swift_ft.log.sender import Link, differs_words
from swift_ft.log.sender_core import BATCH_BYTES, Outgoing
from swift_ft.logs import end_process_on_uncaught

# Messages between a trainer and its sidecar: lines of JSON, described in the module's docstring.

Message = dict[str, Any]


def error_to_json(error: SwiftError | None) -> Message | None:
    return None if error is None else {"class": type(error).__name__, "message": str(error)}


def error_from_json(value: Message | None) -> SwiftError | None:
    if value is None:
        return None
    kind = getattr(errors, value["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, SwiftError)):
        kind = ServiceError
    return kind(value["message"])


# The lease of a trainer that cannot send heartbeats, renewed by its sidecar.
#
# A C extension that does not release the GIL, or one long operation of Python, blocks all threads of a trainer,
# including the one that renews its lease. The trainer has not failed then. So the sidecar sends heartbeats when the
# trainer's are late, as long as the trainer's process exists and is not stopped. The coordinator accepts them for a
# limited time only (`Timing.kept_s`). Whether steps make progress is checked elsewhere.

_CALL_S = 2.0
_LATE = 1.25
"""Intervals after which the trainer's heartbeat is late."""
_NOT_RUNNING = "TtZX"  # as /proc/PID/stat has it: stopped, traced, dead


def is_running(pid: int) -> bool:
    """Returns whether that process exists and is not stopped, traced or dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0].decode() not in _NOT_RUNNING


class LeaseKeeper:
    """(sidecar) A thread that sends heartbeats for the trainer while the trainer sends none. It ends with the trainer,
    or when the trainer no longer holds its rank."""

    def __init__(self, job: str, lease: Mapping[str, Any], trainer: int, memory: Memory) -> None:
        """`lease`: coordinator, rank, incarnation, pid, interval_s. `trainer`: the trainer's pidfd. `memory`: the ring,
        in which the trainer notes when it has renewed its lease."""
        self._memory = memory
        self._sent_at = 0.0
        self._trainer = trainer
        self._pid: int = lease["pid"]
        self._interval_s: float = lease["interval_s"]
        self._beat = pb.HeartbeatRequest(
            job=job, rank=lease["rank"], incarnation=lease["incarnation"], kept=True
        )
        self._channel = open_channel(lease["coordinator"])
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def _run(self) -> None:
        gone = select.poll()
        gone.register(self._trainer, select.POLLIN)
        while not gone.poll(self._interval_s * 500):
            if self._is_late() and is_running(self._pid) and self._is_over():
                break
        self._channel.close()

    def _is_late(self) -> bool:
        """Returns whether a heartbeat is due: the trainer's is late, and this process has sent none for as long."""
        renewed_at = max(self._memory.load(Word.RENEWED) / 1e9, self._sent_at)
        return time.monotonic() - renewed_at > _LATE * self._interval_s

    def _is_over(self) -> bool:
        self._sent_at = time.monotonic()
        try:
            self._stub.Heartbeat(self._beat, timeout=min(_CALL_S, max(0.5, self._interval_s)))
        except grpc.RpcError as error:
            # Other errors are reported by the trainer itself, and the next heartbeat tries again.
            return cast("grpc.Call", error).code() == grpc.StatusCode.FAILED_PRECONDITION
        return False


@dataclass(slots=True)
class _Known:
    """A record that the log has, or that is being sent to it."""

    digest: bytes
    servers: set[str] = field(default_factory=set)
    """Servers that hold it, or that it is being sent to."""


@dataclass(slots=True, eq=False)
class _Taken:
    """A record that was read from the ring, or padding, which is in it until the servers have what is before it."""

    end: int
    """Position of its end."""
    entry: RingEntry | None = None
    stream: str = ""
    sent_to: tuple[str, ...] = ()
    """Servers whose links it was handed to."""
    outcome: str = ""
    """Empty, then "sent", "copied" (only to servers that lacked it), "equal" or "refused"."""


class _Placed(Outgoing):
    """A record whose sequence is stored in the ring before it is sent, so that a successor uses the same one."""

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


GATHER_S = 0.25
"""Batching window: a record waits at most this long for others of its step, because sending each alone wakes ten
threads, here and at the server."""
_GATHER_BYTES = 4 << 20
_SLEEP_S = 0.1
_ASK_S = 1.0
_RETRY_S = 0.1
_WATCH_S = 0.5


class RingWriter:
    """The writer of a sidecar. Its queue is the ring that the trainer fills: it digests the records, compares them with
    those in the log, compresses and sends them, and advances the ring's tail past records that all servers have."""

    def __init__(
        self,
        memory: Memory,
        wake: int,
        tell: Callable[[Message], None],
        *,
        over: Callable[[], bool],
        servers: Mapping[str, int],
        job: str,
        generation: int,
        codec: str = "none",
        fsync: str = "",
        patience_s: float = PATIENCE_S,
        name: str = "",
        resumed: bool = False,
        dropped: int | None = None,
    ) -> None:
        """``tell`` sends a message to the trainer, which may be gone. ``dropped``: position of a `discard` that a
        predecessor has not finished; the records it left must not be sent under the new generation. ``over``: returns
        whether to stop retrying. ``servers``: address -> number; a server gets a new number each time it is added.
        ``resumed``: there was a predecessor, so the servers are asked what they hold of each stream."""
        self._memory = memory
        self._over = over
        self._consumer = Consumer(memory, wake)
        self._tell = tell
        self._pumping = threading.Lock()
        self._sweeping = threading.Lock()
        self._outstanding: deque[_Taken] = deque()
        self._calling = threading.Event()  # another thread waits for `_pumping`
        self._wanted = 0  # a thread waits for the records below this position
        self._asking: SwiftError | None = None
        self._names = [memory.stream(index) for index in range(STREAMS_MAX)]
        self._floor = 0
        self._next_floor = (0, 0)
        """A step, and the position of the ring from which on older ones are forgotten."""
        self._is_behind = False  # there was more in the ring when the last batch ended
        self._resent_before = memory.load(Word.RESENT)
        if dropped is not None:
            self._drop(dropped)
        held = self._consumer.unread_records()
        numbers = memory.assign(servers.values(), held)
        self._copies = {address: numbers[number] for address, number in servers.items()}
        self._lock = threading.Condition()
        self._job = job
        self._generation = generation
        self._codec = codec
        check_codec(codec)
        self._known: dict[str, dict[RecordKey, _Known]] = {}
        self._error: SwiftError | None = None  # of the first refused record, until the next generation
        self.patience_s = patience_s
        self.links = {
            address: Link(address, job, generation, name or job, self.changed, fsync, memory.fd)
            for address in servers
        }
        self._floor_at_start = min([memory.load(Word.FLOOR), *(entry.key.step for entry in held)])
        for address, copy in self._copies.items():
            self._resume(address, copy, held)
        self._resumed = resumed
        self._to_ask: dict[str, list[str]] = {}  # stream -> servers still to be asked for their records of it
        self._damaged: dict[str, list[str]] = {}  # stream -> servers whose copy is damaged

    def _resume(self, server: str, copy: int, held: Sequence[RingEntry]) -> None:
        """Restores the streams' positions on a server from the ring."""
        given: dict[int, list[int]] = {}
        for entry in held:
            if entry.sequence(copy) >= 0:
                given.setdefault(entry.index, []).append(entry.sequence(copy))
        for index, name in enumerate(self._names):
            acked, sequences = self._memory.acked(index, copy), given.get(index, [])
            if name and (acked >= 0 or sequences):
                if acked < 0:  # no record of it has left the ring: it was opened at the first of these
                    acked = sequences[0]
                following = max([acked, *(sequence + 1 for sequence in sequences)])
                self.links[server].resume(name, acked, following)

    # -- main -----------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Sends a batch of the ring's records. If nothing is left, sleeps until there is, at most `_SLEEP_S`."""
        if self._consumer.unread and not self._is_behind:
            self._gather()
        self._is_behind = False
        with self._pumping:
            begin = self._consumer.position
            while not self._calling.is_set() and (taken := self._next()) is not None:
                if taken.entry is not None:
                    self._work_on(taken, taken.entry)
                if taken.end - begin >= BATCH_BYTES:
                    self._batch_done()
                    begin = taken.end
                    self._is_behind = self._consumer.unread > 0
                    break
            if self._consumer.position > begin:
                self._batch_done()
            # Records that the trainer had put in before, copied or not, are still compared.
            if self._next_floor[0] <= self._floor:
                self._next_floor = self._memory.load(Word.FLOOR), self._memory.load(Word.FLOOR_AT)
            floor, position = self._next_floor  # kept until it is reached: the trainer's own is always ahead
            if floor > self._floor and self._consumer.position >= position:
                self._forget_below(floor)
                self._floor = floor
        if not self._is_behind:
            self._consumer.sleep(_SLEEP_S)

    def _batch_done(self) -> None:
        """Sends what the links were given: one message and one answer for each of them."""
        for link in self.links.values():
            link.wake()
        self.changed()

    def _gather(self) -> None:
        """Waits for the rest of a step's records, unless there are enough or a thread waits for them."""
        load, consumer = self._memory.load, self._consumer
        enough = min(_GATHER_BYTES, self._memory.capacity // 4)
        until = time.monotonic() + GATHER_S
        while not (load(Word.URGENT) or load(Word.PRODUCER_WAITS)):
            # The floor moves at the end of a step: records below that position belong to a finished step. A rank that
            # is killed takes with it what it has not sent.
            wanted = max(self._wanted, load(Word.FLOOR_AT))
            left_s = until - time.monotonic()
            if consumer.position < wanted or consumer.unread >= enough or left_s <= 0:
                return
            consumer.sleep(left_s, enough)

    def want(self, position: int) -> None:
        """(any thread) Ends batching for the records below the position, because the caller waits for them."""
        self._wanted = max(self._wanted, position)
        self._consumer.wake()

    def _next(self) -> _Taken | None:
        """Takes the ring's next record. Returns None if there is none, or if it has to be taken later."""
        before = self._consumer.position
        entry = self._consumer.next()
        if entry is None:
            return None
        if isinstance(entry, RingEntry):
            stream = self._names[entry.index] = self._names[entry.index] or self._memory.stream(entry.index)
            if stream not in self._to_ask:
                self._to_ask[stream] = list(self.links) if self._resumed else []
            if self._to_ask[stream]:
                self._batch_done()  # what follows may take long
                if not self._learn(stream):
                    self._consumer.position = before  # taken again later, after the waiting thread
                    return None
            taken = _Taken(entry.end, entry, stream)
        else:
            taken = _Taken(entry)
        with self._sweeping:
            self._outstanding.append(taken)
        return taken

    def _work_on(self, taken: _Taken, entry: RingEntry) -> None:
        try:
            self._send(taken, entry)
        except SwiftError as error:
            self.refuse(error)
            taken.outcome = "refused"
        except Exception as error:  # noqa: BLE001  (a trainer must not wait for a dead thread)
            self.refuse(ServiceError(f"{taken.stream} {entry.key} cannot be logged: {error!r}"))
            taken.outcome = "refused"

    def _send(self, taken: _Taken, entry: RingEntry) -> None:
        """Compares a record, hands it to links, or both. What a killed writer has sent goes to that server again,
        whatever it holds."""
        stream, key = taken.stream, entry.key
        sent_before = [server for server, copy in self._copies.items() if entry.sequence(copy) >= 0]
        digest = digest_of(entry.dtype, entry.shape, entry.body)
        with self._lock:
            known = self._known.setdefault(stream, {}).setdefault(key, _Known(digest))
            missing = [
                server for server in self.links if server in sent_before or server not in known.servers
            ]
        if known.digest != digest and not sent_before:
            raise Divergence(differs_words(stream, key, known.digest, digest))
        if not missing:
            taken.outcome = "equal"
            return
        codec, stored = compress(self._codec, entry.body, DTYPE_BY_NAME[entry.dtype].width)
        body_crc = crc32c.crc32c(stored)
        with self._lock:  # more may be known of the servers by now
            copied = bool(known.servers) and not sent_before
            missing = [server for server in missing if server in sent_before or server not in known.servers]
            for server in missing:
                outgoing = _Placed(
                    entry,
                    self._copies[server],
                    stream=stream,
                    key=key,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    raw_bytes=entry.body.nbytes,
                    codec=CODECS[codec],
                    stored=stored,
                    body_crc=body_crc,
                    digest=digest,
                    place=entry.place if codec == "none" else -1,
                )
                self.links[server].enqueue(outgoing)
            known.servers.update(missing)
            taken.sent_to = tuple(missing)
            taken.outcome = "copied" if copied else "sent"  # last: a reader that sees it uses `sent_to`

    def _forget_below(self, step: int) -> None:
        """Forgets the keys of older steps, which will not be appended again."""
        with self._lock:
            for stream, known in self._known.items():
                self._known[stream] = {key: value for key, value in known.items() if key.step >= step}

    def _learn(self, stream: str) -> bool:
        """Asks the servers which records of the stream they hold. Returns False if it was interrupted before all of
        them answered: call again.

        A server whose copy is damaged is assumed to hold the records of another one, so that none is written over.
        """
        reader = LogReader(list(self.links), self._job)
        began = time.monotonic()
        from_step = self._floor_at_start
        left = self._to_ask[stream]
        damaged = self._damaged.setdefault(stream, [])
        try:
            while left and not (self._calling.is_set() or self._over()):
                try:
                    digests = reader.digests(
                        stream, from_step, left[0], timeout_s=_ASK_S, cancelled=self._over
                    )
                except SwiftError as error:
                    if isinstance(error, RecordTrimmed):
                        if held := reader.holdings(left[0], timeout_s=_ASK_S):
                            from_step = held.trimmed_below_step  # older steps are no longer needed
                            continue
                        error = LogUnavailable(str(error))  # it does not say which ones
                    if isinstance(error, RecordCorrupt) and len(damaged) + 1 < len(self.links):
                        damaged.append(left.pop(0))
                        from_step = self._floor_at_start
                        continue
                    if not isinstance(error, LogUnavailable) or time.monotonic() - began > self.patience_s:
                        self._asking = error
                    time.sleep(_RETRY_S)
                    continue
                try:
                    self.expect(stream, digests, left[0])
                except SwiftError as error:
                    self._asking = error
                    time.sleep(_RETRY_S)
                    continue
                self._asking = None
                from_step = self._floor_at_start
                left.pop(0)
            if left:
                return False
            with self._lock:
                for record in self._known.get(stream, {}).values():
                    record.servers.update(damaged)
            return True
        finally:
            reader.close()

    # -- records leaving the ring ----------------------------------------------------------------------

    def refuse(self, error: SwiftError) -> None:
        """Keeps the error of a refused record, if it is the first one of this generation, and reports it to the
        trainer. This happens before the record leaves the ring, so that the trainer knows even if this process is
        killed. It happens under the lock that keeps the error here: the trainer then begins a new generation, in which
        the error must not come up again."""
        with self._lock:
            if self._error is None:
                self._tell({"trouble": error_to_json(error), "final": True})
                self._error = error

    def changed(self) -> None:
        """(any thread) Removes acknowledged records from the ring, and notifies waiting threads and the trainer."""
        # A record is durable only when all servers have it, so the slowest link sets the pace.
        paces = [pace for link in self.links.values() if (pace := link.pace()) is not None]
        with self._sweeping:
            if paces:
                self._memory.store(Word.PACE, int(min(paces)))
            resent = sum(link.core.resent for link in self.links.values())
            self._memory.store(Word.RESENT, self._resent_before + resent)
            room = self._sweep()
        with self._lock:
            self._lock.notify_all()
        if room:
            self._tell({"room": True})

    def _sweep(self) -> bool:
        """Advances the tail past acknowledged records. Returns whether the trainer waits for room."""
        acked: dict[tuple[str, str], int] = {}
        position, records, size, verified = -1, 0, 0, 0
        while self._outstanding:
            taken = self._outstanding[0]
            if (entry := taken.entry) is not None:
                if not taken.outcome:
                    break  # may be durable already, if a predecessor has sent it, but it is still read
                if not all(self._is_durable(entry, taken.stream, server, acked) for server in taken.sent_to):
                    break
                verified += taken.outcome in ("equal", "copied")
                if taken.outcome == "sent":
                    records, size = records + 1, size + entry.body.nbytes
            self._outstanding.popleft()
            position = taken.end
        return position >= 0 and self._consumer.release(position, Counts(records, size, verified))

    def _is_durable(
        self, entry: RingEntry, stream: str, server: str, acked: dict[tuple[str, str], int]
    ) -> bool:
        """Returns whether the record is durable on that server. ``acked``: cache of this sweep."""
        copy, memory = self._copies[server], self._memory
        sequence = entry.sequence(copy)
        if (stream, server) not in acked:
            known = acked[stream, server] = self.links[server].acked(stream)
            if sequence >= 0 and known > memory.acked(entry.index, copy):
                memory.set_acked(entry.index, copy, known)
        return 0 <= sequence < acked[stream, server]

    # -- control --------------------------------------------------------------------------------------

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
                record.servers.update([server] if server else self.links)

    def set_generation(self, generation: int, *, discard: bool = False) -> None:
        """Reopens the streams under the generation, resends unacknowledged records, and clears errors. ``discard``:
        drops unacknowledged records and all knowledge of the log's content instead, because the log was emptied."""
        with self._lock:
            if generation < self._generation:
                raise UsageError(f"generation {generation} is older than {self._generation}")
            if discard:
                self._known.clear()
            self._generation = generation
            for link in self.links.values():
                link.set_generation(generation, discard)
            self._error = None
            self._lock.notify_all()

    def discard(self, generation: int, upto: int) -> None:
        """(request `restart`) Begins the generation with an empty log and drops all records below the position."""
        self._calling.set()
        try:
            with self._pumping:
                self._calling.clear()
                self.set_generation(generation, discard=True)
                self._resumed = False
                self._to_ask.clear()
                self._damaged.clear()
                self._asking = None
                with self._sweeping:
                    self._drop(upto)
        finally:
            self._calling.clear()
        self._tell({"room": True})

    def _drop(self, upto: int) -> None:
        """Drops records below the position and all acknowledgements: the servers were reset and need not hold them."""
        self._outstanding.clear()
        for index in range(STREAMS_MAX):
            for copy in range(COPIES_MAX):
                self._memory.set_acked(index, copy, -1)
        self._consumer.position = max(self._consumer.position, upto)
        self._consumer.release(self._consumer.position)

    def trouble(self) -> SwiftError | None:
        errors = (link.error(self.patience_s) for link in self.links.values())
        return self._error or self._asking or next((error for error in errors if error is not None), None)

    def flush_to(self, upto: int, timeout_s: float) -> None:
        """(request `flush`) Waits until everything below the position has left the ring. Raises ServiceError after
        `timeout_s`, and the error of `trouble`."""
        deadline = time.monotonic() + timeout_s
        self.want(upto)
        while True:
            # The tail is read first, because an error is recorded before its record leaves the ring.
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
            self.changed()

    def drained(self) -> bool:
        """(the trainer is gone) Returns whether to end: the ring is empty, or its records cannot be sent any more."""
        if self._memory.load(Word.TAIL) == self._memory.load(Word.HEAD) or self._error is not None:
            return True
        return any(isinstance(link.error(0.0), StaleGeneration) for link in self.links.values())


DRAIN_S = 10.0
"""Maximum seconds that a sidecar outlives its trainer, except for a call in progress."""

NEVER_REACHED = 1 << 62


class Sidecar:
    def __init__(self, line: socket.socket, trainer: int) -> None:
        """``trainer``: a pidfd, because a process forked by the trainer may keep the socket open."""
        self._line = line
        self._trainer = trainer
        self._descriptors: list[int] = []
        """Of the ring, and of the eventfd that wakes this process; they come with the first byte."""
        self._sending = threading.Lock()
        self._judging = threading.Lock()
        self._told: SwiftError | None = None
        self._begun = threading.Event()
        self._gone = threading.Event()
        self._drain_s = DRAIN_S
        self._until = float("inf")
        self._writer: RingWriter | None = None

    def run(self) -> None:
        """Runs the main loop. Returns when the trainer is gone and the ring is drained or `DRAIN_S` is over."""
        threading.Thread(target=self._control, name="control", daemon=True).start()
        self._begun.wait()
        writer = self._writer
        if writer is None:
            return  # the trainer was gone before it sent "begin"
        threading.Thread(target=self._watch, args=(writer,), name="watch", daemon=True).start()
        while not self._gone.is_set() or not (writer.drained() or self._over()):
            writer.pump()

    def _over(self) -> bool:
        return time.monotonic() > self._until

    def _leave(self) -> None:
        if not self._gone.is_set():
            self._until = time.monotonic() + self._drain_s
            self._gone.set()
            if self._writer is not None:
                self._writer.want(NEVER_REACHED)

    def send(self, message: Message) -> None:
        with self._sending:
            try:
                self._line.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._leave()

    # -- control --------------------------------------------------------------------------------------

    def _control(self) -> None:
        for line in self._lines():
            self._dispatch(json.loads(line))
        self._leave()
        self._begun.set()

    def _dispatch(self, request: Message) -> None:
        if request["do"] == "flush":
            threading.Thread(target=self._carry_out, args=(request,), daemon=True).start()
            return
        with self._judging:
            self._carry_out(request)

    def _carry_out(self, request: Message) -> None:
        error: SwiftError | None = None
        try:
            self._do(request)
        except SwiftError as raised:
            error = raised
        if request["id"]:
            self.send({"id": request["id"], "error": error_to_json(error)})
        elif error is not None:  # the sidecar could not start
            self.send({"failed": str(error)})
            os._exit(1)

    def _lines(self) -> Iterator[bytes]:
        """Yields the trainer's messages until it is gone or closes the socket."""
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.register(self._trainer, select.POLLIN)
        rest = b""
        while True:
            ready = dict(poll.poll())
            if self._line.fileno() not in ready:
                return  # the trainer has ended, and all its messages were read
            try:
                part, descriptors, _, _ = socket.recv_fds(self._line, 1 << 16, 2)
            except OSError:
                return
            if not part:
                return
            self._descriptors += descriptors
            *lines, rest = (rest + part).split(b"\n")
            yield from filter(None, lines)

    def _do(self, request: Message) -> None:
        do = request["do"]
        if do == "begin":
            fields = request["writer"]
            os.environ.update(request["environment"])
            self._drain_s = min(fields["patience_s"], DRAIN_S)
            events.configure(f"sidecar-{fields['name'] or fields['job']}")
            ring, wake = self._descriptors
            memory = Memory(ring)
            if request["lease"] is not None:
                LeaseKeeper(fields["job"], request["lease"], self._trainer, memory)
            threading.Thread(target=memory.populate, name="populate", daemon=True).start()
            self._writer = RingWriter(memory, wake, self.send, over=self._over, **fields)
            return
        writer = self._writer
        assert writer is not None
        if do == "go":
            self._begun.set()
        elif do == "expect":
            writer.expect(
                request["stream"],
                {RecordKey(*numbers): bytes.fromhex(digest) for *numbers, digest in request["digests"]},
                request["server"],
            )
        elif do == "flush":
            writer.flush_to(request["upto"], request["timeout_s"])
        elif do == "set_generation":
            writer.set_generation(request["generation"])
            self._told = None
        elif do == "restart":
            writer.discard(request["generation"], request["upto"])
            self._told = None
        elif do == "close":
            os._exit(0)  # unacknowledged records are given up
        else:
            raise ServiceError(f"the log's sidecar does not know {do!r}")

    # -- watch ----------------------------------------------------------------------------------------

    def _watch(self, writer: RingWriter) -> None:
        while not self._gone.is_set():
            with self._judging:  # a report about a generation must be sent before the next generation begins
                error = writer.trouble()
                if type(error) is not type(self._told):
                    self._told = error
                    self.send({"trouble": error_to_json(error), "final": False})
            writer.changed()  # a record may be acknowledged before its last message is sent: nothing follows
            self._gone.wait(_WATCH_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m swift_ft.log.sidecar",
        description="Sends to the log what a trainer puts into a ring. Started by the trainer's session.",
    )
    for name in ("socket", "trainer"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="FD")
    given = parser.parse_args(arguments)
    # Only the end of the trainer ends it. Signals to the whole process group or container must not.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sidecar = Sidecar(socket.socket(fileno=given.socket), given.trainer)
    keep_freed_memory()
    # An uncaught error is reported to the trainer, which starts another sidecar: our stderr is /dev/null.
    end_process_on_uncaught(lambda error: sidecar.send({"failed": f"{type(error).__name__}: {error}"}), 1)
    sidecar.run()
    os._exit(0)  # gRPC's threads may still be running


if __name__ == "__main__":
    main()
