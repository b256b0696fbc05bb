"""The sidecar: a child process of a trainer that sends the records in the trainer's ring to the log.

    (trainer)  SidecarWriter starts ``python -m swift_ft.log.sidecar`` with a socket, the ring and a pidfd of its own
    (main)     reads the ring, hands records to the writer; the writer digests, compares, compresses, sends
    (control)  answers the trainer's requests; when the trainer is gone, drains the ring and ends the process
    (watch)    reports to the trainer when the log has a problem, and when it has recovered

It may be killed at any time. Its successor reads the ring from the tail: records that have a sequence are sent again
under the same one, the others are compared with the servers' records. To change servers, the trainer kills it.

Requests and answers are lines of JSON: ``{"id": 3, "do": "flush", …}``, ``{"id": 3, "error": null}``; unsolicited
``{"trouble": …}`` and ``{"room": true}``. Requests with id 0 are not answered.
"""

import argparse
import functools
import json
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import grpc

from swift_ft import errors, events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.credentials import open_channel
from swift_ft.errors import (
    LogUnavailable,
    RecordCorrupt,
    RecordTrimmed,
    ServiceError,
    StaleGeneration,
    SwiftError,
)
from swift_ft.log.memory import keep_freed_memory
from swift_ft.log.placement import COPIES_MAX, PATIENCE_S
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey
from swift_ft.log.ring import STREAMS_MAX, Consumer, Counts, Memory, RingEntry, Word
from swift_ft.log.sender import Delivery, Item
from swift_ft.log.sender_core import BATCH_BYTES, Outgoing
from swift_ft.logs import end_process_on_uncaught

# Messages between a trainer and its sidecar: lines of JSON, described in the module's docstring.

_EXPECT_AT_ONCE = 500

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


def expectations(stream: str, server: str, digests: Mapping[RecordKey, bytes]) -> list[Message]:
    """Returns the "expect" requests for these digests, each of bounded size."""
    out: list[Message] = []
    rest = iter(digests.items())
    while part := list(islice(rest, _EXPECT_AT_ONCE)):
        numbers = [[key.step, key.microbatch, key.slot, digest.hex()] for key, digest in part]
        out.append({"do": "expect", "stream": stream, "server": server, "digests": numbers})
    return out


class Expectations:
    """Records that the servers are known to hold, kept for a sidecar's successor. The caller holds a lock."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[RecordKey, bytes]] = {}

    def add(self, stream: str, server: str, digests: Mapping[RecordKey, bytes]) -> None:
        """Adds records of a server. Raises RecordCorrupt as `Delivery.expect` does, because a successor could not
        start with contradicting digests."""
        for (other_stream, other), known in self._known.items():
            for key in known.keys() & digests.keys() if other_stream == stream else ():
                if known[key] != digests[key]:
                    raise RecordCorrupt(
                        f"{stream} {key} differs between its copies (on {other} {known[key].hex()}; on {server} "
                        f"{digests[key].hex()})"
                    )
        self._known.setdefault((stream, server), {}).update(digests)

    def keep(self, servers: Collection[str]) -> None:
        """Forgets the records of all other servers."""
        self._known = {where: known for where, known in self._known.items() if where[1] in servers}

    def forget_below(self, step: int) -> None:
        left = {
            where: {key: digest for key, digest in known.items() if key.step >= step}
            for where, known in self._known.items()
        }
        self._known = {where: known for where, known in left.items() if known}

    def clear(self) -> None:
        self._known.clear()

    def messages(self) -> list[Message]:
        return [
            message
            for (stream, server), known in self._known.items()
            for message in expectations(stream, server, known)
        ]


# The lease of a trainer that cannot send heartbeats, renewed by its sidecar.
#
# A C extension that does not release the GIL, or one long operation of Python, blocks all threads of a trainer,
# including the one that renews its lease. The trainer has not failed then. So the sidecar sends heartbeats as well, as
# long as the trainer's process exists and is not stopped. The coordinator accepts them for a limited time only
# (`Timing.kept_s`). Whether steps make progress is checked elsewhere.

_CALL_S = 2.0
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_NOT_RUNNING = "TtZX"  # as /proc/PID/stat has it: stopped, traced, dead


def is_running(pid: int, proc: Path = Path("/proc")) -> bool:
    """Returns whether that process exists and is not stopped, traced or dead."""
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0].decode() not in _NOT_RUNNING


class LeaseKeeper:
    """(sidecar) A thread that sends a heartbeat for the trainer every `interval_s`. It ends with the trainer, or when
    the trainer no longer holds its rank."""

    def __init__(self, job: str, lease: Mapping[str, Any], trainer: int) -> None:
        """`lease`: coordinator, rank, incarnation, pid, interval_s. `trainer`: the trainer's pidfd."""
        self._trainer = trainer
        self._pid: int = lease["pid"]
        self._interval_s: float = lease["interval_s"]
        self._beat = pb.HeartbeatRequest(
            job=job, rank=lease["rank"], incarnation=lease["incarnation"], kept=True
        )
        self._channel = open_channel(lease["coordinator"], _OPTIONS)
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def _run(self) -> None:
        gone = select.poll()
        gone.register(self._trainer, select.POLLIN)
        while not gone.poll(self._interval_s * 1000):
            if is_running(self._pid) and self._is_over():
                break
        self._channel.close()

    def _is_over(self) -> bool:
        try:
            self._stub.Heartbeat(self._beat, timeout=_CALL_S)
        except grpc.RpcError as error:
            # Other errors are reported by the trainer itself, and the next heartbeat tries again.
            return cast("grpc.Call", error).code() == grpc.StatusCode.FAILED_PRECONDITION
        return False


# The writer of a sidecar. Its queue is the ring that the trainer fills; acknowledged records leave the ring.

GATHER_S = 0.25
"""Batching window: a record waits at most this long for others of its step, because sending each alone wakes ten
threads, here and at the server."""
_NAP_S = 0.02
_SLEEP_S = 0.1
_ASK_S = 1.0
_RETRY_S = 0.1


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


class RingWriter:
    """Hands the ring's records to a `Delivery`, and advances the ring's tail past records that all servers have.

    The sidecar's threads call its methods.
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
        codec: str = "none",
        fsync: str = "",
        patience_s: float = PATIENCE_S,
        name: str = "",
    ) -> None:
        """``tell`` sends a message to the trainer, which may be gone. ``dropped``: position of a `discard` that a
        predecessor has not finished; the records it left must not be sent under the new generation. ``over``: returns
        whether to stop retrying. ``servers``: address -> number; a server gets a new number each time it is added."""
        self._memory = memory
        self._over = over
        self._consumer = Consumer(memory, wake)
        self._tell = tell
        self._pumping = threading.Lock()
        self._sweeping = threading.Lock()
        self._outstanding: deque[tuple[int, RingEntry | None, Item | None]] = deque()
        self._calling = threading.Event()  # another thread waits for `_pumping`
        self._wanted = 0  # a thread waits for the records below this position
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
            on_change=self._on_change,
            on_error=self._on_error,
            lock=self._lock,
        )
        """Threads that process the ring's records."""
        self._floor_at_start = min([memory.load(Word.FLOOR), *(entry.key.step for entry in held)])
        given = [self._resume(address, copy, held) for address, copy in self._copies.items()]
        resumed = memory.load(Word.TAIL) > 0 or any(given)
        self._unlearned = {
            name: list(servers) for name in (self._names if resumed else ()) if name
        }  # streams of which a predecessor may have sent records -> servers still to be asked for them
        self._damaged: dict[str, list[str]] = {}  # stream -> servers whose copy is damaged

    def _resume(self, server: str, copy: int, held: Sequence[RingEntry]) -> bool:
        """Restores the streams' positions on a server from the ring. Returns whether a predecessor has sent records
        that are still in the ring."""
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
                self.delivery.links[server].resume(name, acked, following)
        return bool(given)

    # -- main -----------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Hands the ring's records to the delivery, then sleeps until there are more, at most `_SLEEP_S`."""
        if self._consumer.unread:
            self._gather()
        with self._pumping:
            while not self._calling.is_set() and self._take_next():
                pass
            # Records that the trainer had put in before, copied or not, are still compared.
            floor = self._memory.load(Word.FLOOR)
            if floor > self._floor and self._consumer.position >= self._memory.load(Word.FLOOR_AT):
                self.delivery.forget_below(floor)
                self._floor = floor
        self._consumer.sleep(_SLEEP_S)

    def _gather(self) -> None:
        """Waits for the rest of a step's records, unless there is enough for a message or a thread waits for them."""
        load, consumer = self._memory.load, self._consumer
        enough = min(BATCH_BYTES, self._memory.capacity // 4)
        until = time.monotonic() + GATHER_S
        while not (load(Word.URGENT) or load(Word.PRODUCER_WAITS)):
            # The floor moves at the end of a step: records below that position belong to a finished step.
            wanted = max(self._wanted, load(Word.FLOOR_AT))
            if consumer.position < wanted or consumer.unread >= enough or time.monotonic() > until:
                return
            consumer.nap(_NAP_S)

    def want(self, position: int) -> None:
        """(any thread) Ends batching for the records below the position, because the caller waits for them."""
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
            self._consumer.position = before  # taken again later, after the waiting thread
            return False
        framed = functools.partial(self._placed, entry)
        sent_before = [s for s, copy in self._copies.items() if entry.sequence(copy) >= 0]
        item = Item(stream, entry.key, entry.dtype, entry.shape, entry.body, framed, sent_before)
        with self._sweeping:
            self._outstanding.append((entry.end, entry, item))
        self.delivery.put(item)
        return True

    def _placed(self, entry: RingEntry, server: str, **fields: Any) -> Outgoing:
        return _Placed(entry, self._copies[server], **fields)

    def _learn(self, stream: str) -> bool:
        """Asks the servers which records of the stream they hold. Returns False if it was interrupted before all of
        them answered: call again.

        A server whose copy is damaged is assumed to hold the records of another one, so that none is written over.
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
                        from_step = floor  # older steps are no longer needed
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

    # -- records leaving the ring ----------------------------------------------------------------------

    def _on_error(self, error: SwiftError) -> None:
        """(holding the lock) Reports the error to the trainer. This happens before the record leaves the ring, so that
        the trainer knows even if this process is killed. It happens under the lock that stores the error here: the
        trainer then begins a new generation, in which the error must not come up again."""
        self._tell({"trouble": error_to_json(error), "final": True})

    def _on_change(self) -> None:
        """Removes acknowledged records from the ring, and notifies waiting threads and the trainer."""
        with self._sweeping:
            self._memory.store(Word.RESENT, self._resent_before + self.delivery.resent)
            self._memory.store(Word.PACE, int(self.delivery.pace_bytes_per_s))
            room = self._sweep()
        with self._lock:
            self._lock.notify_all()
        if room:
            self._tell({"room": True})

    def publish_acknowledged(self) -> None:
        """Rechecks acknowledgements, because a record of several messages may be acknowledged before its last message
        is sent, and no other event follows."""
        self.delivery.changed()

    def _sweep(self) -> bool:
        """Advances the tail past acknowledged records. Returns whether the trainer waits for room."""
        acked: dict[tuple[str, str], int] = {}
        position, records, size, stored, verified = -1, 0, 0, 0, 0
        while self._outstanding:
            end, entry, item = self._outstanding[0]
            if entry is not None and item is not None:
                if not item.outcome:
                    break  # may be durable already, if a predecessor has sent it, but the worker still reads it
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
        """Returns whether the record is durable on that server. ``acked``: cache of this sweep."""
        copy, memory = self._copies[server], self._memory
        sequence = entry.sequence(copy)
        if (stream, server) not in acked:
            known = acked[stream, server] = self.delivery.links[server].acked(stream)
            if sequence >= 0 and known > memory.acked(entry.index, copy):
                memory.set_acked(entry.index, copy, known)
        return 0 <= sequence < acked[stream, server]

    # -- control --------------------------------------------------------------------------------------

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str) -> None:
        self.delivery.expect(stream, digests, server)

    def set_generation(self, generation: int) -> None:
        self.delivery.set_generation(generation)

    def discard(self, generation: int, upto: int) -> None:
        """(request `restart`) Begins the generation with an empty log and drops all records below the position."""
        self._calling.set()
        try:
            with self._pumping:
                self._calling.clear()
                self.delivery.set_generation(generation, discard=True)
                self._unlearned.clear()
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
        return self.delivery.error or self._asking or self.delivery.trouble()

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

    def drained(self) -> bool:
        """(the trainer is gone) Returns whether to end: the ring is empty, or its records cannot be sent any more."""
        if self._memory.load(Word.TAIL) == self._memory.load(Word.HEAD) or self.delivery.error is not None:
            return True
        return any(isinstance(link.error(0.0), StaleGeneration) for link in self.delivery.links.values())


DRAIN_S = 10.0
"""Maximum seconds that a sidecar outlives its trainer, except for a call in progress."""

NEVER_REACHED = 1 << 62


class Sidecar:
    def __init__(self, line: socket.socket, memory: Memory, wake: int, trainer: int) -> None:
        """``trainer``: a pidfd, because a process forked by the trainer may keep the socket open."""
        self._line = line
        self._memory = memory
        self._wake = wake
        self._trainer = trainer
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
        threading.Thread(target=self._memory.populate, name="populate", daemon=True).start()
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

    def tell(self, message: Message) -> None:
        with self._sending:
            try:
                self._line.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._leave()

    # -- control --------------------------------------------------------------------------------------

    def _control(self) -> None:
        for line in self._lines():
            self._hear(json.loads(line))
        self._leave()
        self._begun.set()

    def _hear(self, request: Message) -> None:
        if request["do"] == "flush":
            threading.Thread(target=self._flush, args=(request,), daemon=True).start()
            return
        with self._judging:
            error: SwiftError | None = None
            try:
                self._do(request)
            except SwiftError as raised:
                error = raised
            self._answer(request, error)

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
                part = self._line.recv(1 << 16)
            except OSError:
                return
            if not part:
                return
            *lines, rest = (rest + part).split(b"\n")
            yield from lines

    def _do(self, request: Message) -> None:
        do = request["do"]
        if do == "begin":
            self._drain_s = min(request["patience_s"], DRAIN_S)
            events.configure(f"sidecar-{request['name'] or request['job']}")
            if request["lease"] is not None:
                LeaseKeeper(request["job"], request["lease"], self._trainer)
            self._writer = RingWriter(
                self._memory,
                self._wake,
                self.tell,
                request["dropped"],
                over=self._over,
                servers=request["servers"],
                job=request["job"],
                generation=request["generation"],
                codec=request["codec"],
                fsync=request["fsync"],
                patience_s=request["patience_s"],
                name=request["name"],
            )
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

    def _flush(self, request: Message) -> None:
        assert self._writer is not None
        error: SwiftError | None = None
        try:
            self._writer.flush_to(request["upto"], request["timeout_s"])
        except SwiftError as raised:
            error = raised
        self._answer(request, error)

    def _answer(self, request: Message, error: SwiftError | None) -> None:
        if request["id"]:
            self.tell({"id": request["id"], "error": error_to_json(error)})
        elif error is not None:  # the sidecar could not start
            self.tell({"failed": str(error)})
            os._exit(1)

    # -- watch ----------------------------------------------------------------------------------------

    def _watch(self, writer: RingWriter) -> None:
        while not self._gone.is_set():
            with self._judging:  # a report about a generation must be sent before the next generation begins
                error = writer.trouble()
                if type(error) is not type(self._told):
                    self._told = error
                    self.tell({"trouble": error_to_json(error), "final": False})
            writer.publish_acknowledged()
            self._gone.wait(_SLEEP_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m swift_ft.log.sidecar",
        description="Sends to the log what a trainer puts into a ring. Started by the trainer's session.",
    )
    for name in ("socket", "ring", "wake", "trainer"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="FD")
    given = parser.parse_args(arguments)
    # Only the end of the trainer ends it. Signals to the whole process group or container must not.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sidecar = Sidecar(socket.socket(fileno=given.socket), Memory(given.ring), given.wake, given.trainer)
    keep_freed_memory()
    # An uncaught error is reported to the trainer, which starts another sidecar: our stderr is /dev/null.
    end_process_on_uncaught(lambda error: sidecar.tell({"failed": f"{type(error).__name__}: {error}"}), 1)
    sidecar.run()
    os._exit(0)  # gRPC's threads may still be running


if __name__ == "__main__":
    main()
