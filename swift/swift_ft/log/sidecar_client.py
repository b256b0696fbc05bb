"""The writing end of the log, in a trainer: `SidecarWriter`, whose work is done by a sidecar process."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from swift_ft import events
from swift_ft.errors import LogInterrupted, LogUnavailable, ServiceError, SwiftError, UsageError
from swift_ft.log.codec import check_codec
from swift_ft.log.placement import COPIES_MAX, PATIENCE_S
from swift_ft.log.record import (
    DIMS_MAX,
    DTYPE_BY_NAME,
    MARK_DTYPE,
    MARK_SHAPE,
    RecordKey,
    Unlogged,
    check_name,
)
from swift_ft.log.ring import HEADER_BYTES, Memory, Producer, Word, header_of, producer
from swift_ft.log.sidecar import Expectations, Message, error_from_json, expectations, is_running

# Starts a sidecar process, holds the connection to it, and kills one that stays stopped.

STOPPED_S = 3.0
"""Seconds after which a stopped sidecar (SIGSTOP, a debugger) is killed, because a recovery waits for its answer."""


class Line:
    """The trainer's end of the connection to a sidecar. Sending never blocks: a stopped sidecar does not read, and the
    messages may exceed the socket's buffer. A thread sends what the socket does not accept at once."""

    def __init__(self, ours: socket.socket) -> None:
        """Raises RuntimeError if no thread can be started."""
        self._socket = ours
        self._changed = threading.Condition()
        self._left: deque[bytes] = deque()
        """Unsent data, in order. The thread is sending the first entry."""
        self._closed = False
        threading.Thread(target=self._send, name="log-sidecar-line", daemon=True).start()

    def put(self, data: bytes) -> None:
        """(any thread) Sends data, in the order of the calls. Data for a dead sidecar is discarded."""
        with self._changed:
            if not self._left:
                data = data[self._taken_at_once(data) :]
            if data:
                self._left.append(data)
                self._changed.notify()

    def heard(self) -> BinaryIO:
        """Returns the stream of the sidecar's messages, to be read by one thread."""
        return self._socket.makefile("rb")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # frees the thread that sends
        self._socket.close()

    def _taken_at_once(self, data: bytes) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self._closed)
                if self._closed:
                    return
                data = self._left[0]
            with contextlib.suppress(OSError):  # it is dead: the remaining data fails as well
                self._socket.sendall(data)
            with self._changed:
                self._left.popleft()


def spawn(module: str, ring: int, wake: int) -> "tuple[subprocess.Popen[bytes], Line]":
    """Starts `module` as a process. Returns it and the connection to it. ``ring``, ``wake``: file descriptors."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    with contextlib.ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.callback(theirs.close)
        failed = stack.enter_context(contextlib.ExitStack())
        failed.callback(ours.close)
        line = Line(ours)
        failed.callback(line.close)
        trainer = os.pidfd_open(os.getpid())
        stack.callback(os.close, trainer)
        fds = {"socket": theirs.fileno(), "ring": ring, "wake": wake, "trainer": trainer}
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", module),
                *(word for name, fd in fds.items() for word in (f"--{name}", str(fd))),
            ],
            # It may outlive this process: a reader of our output must not wait for the sidecar to close it.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(fds.values()),
            start_new_session=True,  # signals to our process group must not reach it
            env={**os.environ, "PYTHONPATH": ":".join(filter(None, paths))},
        )
        failed.pop_all()
        return process, line


class Stopped:
    """Detector of a stopped sidecar. A caller that waits for the sidecar polls ``check``, which kills a sidecar that
    stays stopped for `STOPPED_S`. A sidecar may be killed at any time."""

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None
        """Process that was found stopped, and the time."""

    def check(self, process: "subprocess.Popen[bytes]") -> None:
        now = time.monotonic()
        if is_running(process.pid):
            self._since = None
        elif self._since is None or self._since[0] != process.pid:
            self._since = (process.pid, now)
        elif now - self._since[1] > STOPPED_S:
            process.kill()


# Keeps a sidecar running for a trainer's ring: starts it, sends it requests, and replaces one that dies.
#
# The successor of a dead sidecar continues with the same ring. It is sent the servers, the records that they are known
# to hold, and the requests without an answer. A sidecar is killed and replaced on purpose when a new generation has
# other servers.

ANSWER_S = 60.0
POLL_S = 0.25
_RESTARTS_MAX, _RESTARTS_WITHIN_S = 5, 10.0


class SidecarSupervisor:
    """Owner of a trainer's sidecar; the base class of a writer. Its methods may be called by any thread of the trainer.
    A thread of its own reads the sidecar's messages and notices its death."""

    def __init__(
        self,
        module: str,
        ring: int,
        wake: int,
        servers: Sequence[str],
        generation: int,
        begin: Message,
        refused: Callable[[SwiftError], None],
    ) -> None:
        """`module`: the program to start. `ring`, `wake`: file descriptors. `begin`: the first message to every sidecar
        of this ring. `refused(error)` is called, by another thread, with an error that no successor can repair."""
        self._module = module
        self._ring, self._wake = ring, wake
        self._begin = begin
        self._refused = refused
        self.generation = generation
        self.restarts = self._coming = self._number = 0
        self._servers: dict[str, int] = {}
        """Log servers that keep the streams -> their numbers in the ring (`swift_ft.log.ring.Memory.assign`)."""
        self._renumber(servers)
        self.changed = threading.Condition()
        """Notified after every message of the sidecar, and when a successor has replaced it."""
        self._replacing = threading.Lock()
        self._dead: SwiftError | None = None  # set once there is no sidecar and none will be started
        self._error: SwiftError | None = None  # until the next generation
        self._trouble: SwiftError | None = None  # until the sidecar reports otherwise
        self._interrupted = self._closed = False
        self._last_words = ""
        self._waiting: dict[int, Message] = {}  # requests without an answer
        self._answers: dict[int, SwiftError | None] = {}
        self._expected = Expectations()
        self._deaths: deque[float] = deque()
        self._moving = False  # the sidecar was killed on purpose
        self._stopped = Stopped()
        self._start()
        name = begin["name"] or begin["job"]
        self._listener = threading.Thread(target=self._listen, name=f"log-sidecar-{name}", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def raise_pending(self, may_drop: bool = False) -> None:
        """Raises ServiceError once the writer is closed, LogInterrupted while a new generation is formed, and the log's
        pending error. ``may_drop``: ignores LogUnavailable that the sidecar reports as trouble."""
        if self._closed:
            raise ServiceError("this log writer is closed")
        if self._interrupted:
            raise LogInterrupted("the log writer was interrupted: a new generation is being formed")
        trouble = None if may_drop and isinstance(self._trouble, LogUnavailable) else self._trouble
        error = self._dead or self._error or trouble
        if error is not None:
            raise error

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """Declares records that one server (empty: every one) holds of a stream: these keys are compared, and not sent
        there. Raises RecordCorrupt if another copy has a different record under one of these keys."""
        check_name("stream", stream)
        for holder in [server] if server else list(self._servers):
            with self.changed:  # recorded for a successor of the sidecar
                self._expected.add(stream, holder, digests)
            for message in expectations(stream, holder, digests):
                self._request(message)

    def _forget_expected(self, step: int) -> None:
        """Forgets expectations of older steps. A successor that still compares such records asks the servers."""
        with self.changed:
            self._expected.forget_below(step)

    def _flush_to(self, upto: int, timeout_s: float) -> None:
        """Waits until everything in the ring below this position is acknowledged. Raises ServiceError after
        `timeout_s`, and the errors of `raise_pending`."""
        with self.changed:
            self.raise_pending()
        self._request(
            {"do": "flush", "upto": upto, "timeout_s": timeout_s}, timeout_s + ANSWER_S, callable_off=True
        )

    def await_ready(self) -> None:
        """Waits until the sidecar works. Optional, for a trainer at its start."""
        self._request({"do": "go"})

    def interrupt(self) -> None:
        """(any thread) Makes blocked and later appends and flushes raise LogInterrupted, until set_generation."""
        with self.changed:
            self._interrupted = True
            self.changed.notify_all()

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        """(after a fence) Continues under the new generation: reopens streams, resends unacknowledged records, clears
        pending errors. ``servers``: the servers that keep the streams from now on (empty: unchanged). ``emptied``:
        those of them that were restarted without their data."""
        if generation >= self.generation and servers and (emptied or set(servers) != set(self._servers)):
            self._move(generation, servers, emptied)
        self._enter(generation, {"do": "set_generation", "generation": generation})

    def _restart(self, generation: int, upto: int) -> None:
        """Drops the ring's records below `upto`, and all knowledge of the log's content."""
        with self.changed:
            if self._closed:
                self.raise_pending()
            self._expected.clear()
        self._enter(generation, {"do": "restart", "generation": generation, "upto": upto})

    def _move(self, generation: int, servers: Sequence[str], emptied: Collection[str]) -> None:
        """Kills the sidecar, so that its successor begins with these servers. The successor sends the ring's records to
        the servers that lack them."""
        with self._replacing:
            with self.changed:
                if self._closed:
                    self.raise_pending()
                self._renumber(servers, emptied)
                self.generation = generation
                self._expected.keep(self._servers.keys() - emptied)
            self._moving = True
            self._process.kill()
            self._process.wait()  # it sends no answers after this

    def _renumber(self, servers: Sequence[str], emptied: Collection[str] = ()) -> None:
        if len(set(servers)) > COPIES_MAX:
            raise UsageError(f"at most {COPIES_MAX} log servers keep what a rank writes, not {len(servers)}")
        before = {server: number for server, number in self._servers.items() if server not in emptied}
        self._servers = {}
        for server in dict.fromkeys(servers):
            if server not in before:
                self._coming += 1
            self._servers[server] = before.get(server, self._coming)

    def _enter(self, generation: int, message: Message) -> None:
        if generation < self.generation:
            raise UsageError(f"generation {generation} is older than {self.generation}")
        with self.changed:
            self.generation = generation  # also used for a successor of the sidecar
            self._interrupted = False
            self._request(message)

    def _end(self) -> None:
        with self._replacing, self.changed:
            self._closed = True
            self.changed.notify_all()
        self._send({"id": 0, "do": "close"})
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(5.0)
        self._line.close()

    def _start(self) -> None:
        try:
            self._process, line = spawn(self._module, self._ring, self._wake)
        except (OSError, RuntimeError) as error:  # no process, or no thread
            raise ServiceError(f"the log's sidecar cannot be started: {error}") from None
        with self.changed:
            self._line = line  # within the lock: no request may be sent before "begin"
            again = self._waiting.values()
            dropped = max((request["upto"] for request in again if request["do"] == "restart"), default=None)
            first = {"do": "begin", "generation": self.generation, "dropped": dropped, **self._begin}
            first["servers"] = self._servers
            for message in (first, *self._expected.messages(), *again, {"do": "go"}):
                self._send({"id": 0, **message})
        events.emit(
            "sidecar_started", name=self._begin["name"], sidecar_pid=self._process.pid, restarts=self.restarts
        )

    def _send(self, message: Message) -> None:
        """Sends a message without blocking. If the sidecar is dead, `_replace` resends requests to its successor."""
        self._line.put(json.dumps(message).encode() + b"\n")

    def _request(self, message: Message, timeout_s: float = ANSWER_S, callable_off: bool = False) -> None:
        """Sends a request and waits for its answer. Raises the error in the answer, and LogUnavailable after
        `timeout_s`. `callable_off`: raises pending errors of the log as well, instead of waiting."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            self._number += 1
            number = self._number
            self._waiting[number] = {"id": number, **message}
            self._send(self._waiting[number])
            try:
                while number not in self._answers:
                    if self._closed or callable_off:
                        self.raise_pending()
                    if self._dead is not None:
                        raise self._dead
                    if time.monotonic() > deadline:
                        raise LogUnavailable(f"the log's sidecar does not answer within {timeout_s:g} s")
                    self._stopped.check(self._process)  # if killed, its successor gets the request again
                    self.changed.wait(POLL_S)
                error = self._answers.pop(number)
            finally:
                del self._waiting[number]
        if error is not None:
            raise error

    def _listen(self) -> None:
        while True:
            with self._line.heard() as lines:
                try:
                    for line in lines:
                        if line.endswith(b"\n"):
                            self._on_message(json.loads(line))
                except OSError:
                    self._last_words = "its connection was reset"
            with self._replacing:
                if self._closed:
                    return
                self._process.kill()  # it may have lost only its socket, and there must never be two sidecars
                self._process.wait()
                self._line.close()
                problem = self._replace()
            with self.changed:
                self._trouble, self._dead = None, problem
                self.changed.notify_all()
            if problem is not None:
                return

    def _replace(self) -> SwiftError | None:
        """Starts another sidecar for the same ring. Returns an error if it cannot be started, or if sidecars have died
        too often lately."""
        if not self._moving:
            self.restarts += 1
            self._deaths.append(time.monotonic())
        self._moving = False
        while self._deaths and self._deaths[0] < self._deaths[-1] - _RESTARTS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) > _RESTARTS_MAX:
            return LogUnavailable(
                f"the log's sidecar has died {len(self._deaths)} times within {_RESTARTS_WITHIN_S:g} s "
                f"(exit code {self._process.returncode}{': ' if self._last_words else ''}{self._last_words})"
            )
        try:
            self._start()
        except SwiftError as error:
            return error
        return None

    def _on_message(self, message: Message) -> None:
        with self.changed:
            if "trouble" in message:
                error = error_from_json(message["trouble"])
                if error is not None and message["final"]:
                    if self._error is None:
                        self._refused(error)
                        self._error = error
                else:
                    self._trouble = error
            elif "failed" in message:
                self._last_words = message["failed"]
            elif message.get("id") in self._waiting:
                error = self._answers[message["id"]] = error_from_json(message["error"])
                if error is None and self._waiting[message["id"]]["do"] in ("set_generation", "restart"):
                    self._error = self._trouble = None
            self.changed.notify_all()


# The writing end of the log for a trainer: a ring in shared memory, and the sidecar that drains it.


@dataclass(slots=True)
class WriterStats:
    """Counts since the writer was created."""

    records: int = 0
    """Records that all servers have acknowledged."""
    bytes: int = 0
    """Raw bytes of these records."""
    stored_bytes: int = 0
    """Bytes of these records after compression."""
    verified: int = 0
    """Records that the log already had, found equal."""
    resent: int = 0
    """Records sent again after a lost connection or a fence."""
    blocked_seconds: float = 0.0
    """Total seconds that `append_at` waited because the queue was full."""
    dropped_records: int = 0
    """Records not logged because the queue was full (when_full="drop")."""
    dropped_bytes: int = 0
    pace_bytes_per_s: float = 0.0
    """Raw bytes per second that the slowest log server acknowledged lately, while it was busy; 0: not known yet."""


class Borrower(Protocol):
    def finish(self) -> None:
        """(a flush, a full ring) Waits until all bodies in progress are written."""

    def let_go(self) -> None:
        """(the writer is closed) Waits until the borrower has stopped writing."""


class _Nobody:
    def finish(self) -> None: ...

    def let_go(self) -> None: ...


NOBODY: Borrower = _Nobody()
"""Placeholder while the ring has no borrower."""


class SidecarWriter(SidecarSupervisor):
    """Writer of all streams of one rank, to each of the servers that keep a copy.

    Call sequence::

        (coordinator)        admin.fence(server, job, generation)      grants the generation
        (a rank)             writer = SidecarWriter(servers, job, generation)
        (channel)            append_at, for every tensor               returns at once
        (restorer)           expect → … unlogged.lacks → declare; restart if the log starts empty
        (new generation)     interrupt                                 frees a blocked append
        (engine)             set_generation                            sends again what was not acknowledged
        (engine)             flush                                     before a report: all of it is durable
        (engine)             forget_below                              after a step

    `append_at` puts a record into the ring within microseconds, and a native thread copies its body. The body must not
    change until `wait_copied`, or until `copied` has passed the position that `append_at` returned. Then the caller may
    reuse it.

    A record goes to every server, each of which assigns its own sequence, and stays in the ring until all have
    acknowledged it. One that the log already has is compared and not sent. While the ring is full, `append_at` blocks,
    or with ``when_full="drop"`` drops the record and declares its step unlogged (`swift_ft.log.record`).

    A server may be killed and restarted on the same address and directory without loss or duplicates. When other
    servers replace it (`set_generation`), they receive the records that it had not acknowledged, and those that are
    appended again. Errors in the background are raised by the next `append_at` or `flush`: Divergence (names stream,
    step, microbatch and slot) and SequenceConflict until the next generation; LogUnavailable after ``patience_s``
    without an acknowledgement, until the log makes progress.

    A sidecar that outlives its trainer sends the ring's records, for at most 10 s.
    """

    module = "swift_ft.log.sidecar"  # the program to start

    def __init__(
        self,
        servers: Sequence[str],
        job: str,
        generation: int,
        *,
        codec: str = "none",
        fsync: str = "",
        queue_bytes: int = 256 << 20,
        patience_s: float = PATIENCE_S,
        when_full: str = "block",
        name: str = "",
        lease: Mapping[str, Any] | None = None,
    ) -> None:
        """``codec``: "none", "lz4" or "bitshuffle". ``fsync``: when a record counts as durable ("always", "interval",
        "never"); empty: the server's default. ``queue_bytes``: size of the ring. ``lease``: the trainer's lease, which
        the sidecar renews as well (`swift_ft.log.sidecar.LeaseKeeper`). Raises UsageError if this machine cannot have a
        ring."""
        check_name("job", job)
        check_codec(codec)
        self.job = job
        self._patience_s = patience_s
        self._pushing = threading.Lock()
        # Held while the ring's words are read. Once `_stats` is set, the ring is unmapped.
        self._mapped = threading.Lock()
        self.drops = when_full == "drop"
        """If True, records are dropped while the ring is full, and their steps are declared unlogged."""
        self.unlogged = Unlogged(self._pushing)
        """Record of the unlogged steps. The engine and the restorer read it and add to it."""
        self._blocked_seconds = 0.0
        self._streams: dict[str, int] = {}
        self._stats: WriterStats | None = None  # set on close
        self._borrower = NOBODY
        self._memory = Memory.create(queue_bytes)
        self._urgent = self.drops  # a writer that drops records does not batch them
        self._memory.store(Word.URGENT, self._urgent)
        self._largest = self._memory.capacity - HEADER_BYTES
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._producer = producer(self._memory, self._wake)
        begin: Message = {
            "job": job,
            "codec": codec,
            "fsync": fsync,
            "patience_s": patience_s,
            "name": name,
            "lease": None if lease is None else dict(lease),
        }
        try:
            super().__init__(
                self.module, self._memory.fd, self._wake, servers, generation, begin, self.unlogged.refuse
            )
        except SwiftError:
            self._free_ring()
            raise

    @property
    def stats(self) -> WriterStats:
        """(any thread) Counts of acknowledged records, and of records that were found equal."""
        with self._mapped:
            return self._stats or self._counted()

    def _counted(self) -> WriterStats:
        counts = self._memory.counts()._asdict()
        return WriterStats(
            **counts,
            resent=self._memory.load(Word.RESENT),
            blocked_seconds=self._blocked_seconds,
            dropped_records=self.unlogged.records,
            dropped_bytes=self.unlogged.bytes,
            pace_bytes_per_s=float(self._memory.load(Word.PACE)),
        )

    @property
    def queued_bytes(self) -> int:
        """(any thread) Bytes in the ring that the log has not acknowledged."""
        with self._mapped:
            return 0 if self._stats is not None else self._producer.reserved - self._memory.load(Word.TAIL)

    @property
    def copied(self) -> int:
        """Ring position below which all bodies are copied, so that the caller may reuse them."""
        with self._mapped:
            return self._producer.reserved if self._stats is not None else self._memory.load(Word.HEAD)

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
        """Appends a tensor of ``size`` bytes at an address. Returns the position that `copied` will pass once they are
        copied, or -1 if the record was dropped.

        ``now``: the calling thread copies them before this returns. While the ring is full, waits or drops the record;
        with ``keep`` it always waits (a replay: other ranks wait for the record). A key that the stream has already
        (appended before by this writer, or declared by `expect`) is compared and not sent. Raises errors from the
        background (LogUnavailable only if the record must be kept), LogInterrupted after `interrupt`, and UsageError
        for an invalid record or one that is larger than the ring.
        """
        may_drop = self.drops and not keep
        with self._pushing:
            self.raise_pending(may_drop)
            if size > self._largest:
                raise UsageError(
                    f"{stream} {key}: {size} bytes are more than the log's queue holds ({self._largest}); "
                    "give a larger log_queue_bytes"
                )
            if dtype not in DTYPE_BY_NAME:
                raise UsageError(f"{stream} {key}: element type {dtype!r} cannot be logged")
            if len(shape) > DIMS_MAX:
                raise UsageError(f"{stream} {key}: {len(shape)} dimensions; at most {DIMS_MAX} can be logged")
            header = header_of(self._index(stream), key, dtype, shape, size)
            if may_drop:
                refused = self.unlogged.refuses(stream, key.step, self.queued_bytes, self._memory.capacity)
                tried = not refused and self._declared(stream, wait=False)
                end = self._producer.push(header, address, size, now) if tried else -1
                if end < 0:
                    self.unlogged.drop(stream, key.step, size)
                return end
            if keep != self._urgent:  # a replay: other ranks may wait for its records
                self._urgent = keep
                self._memory.store(Word.URGENT, keep)
            self._declared(stream, wait=True)
            end = self._producer.push(header, address, size, now)
            return end if end >= 0 else self._push_later(header, address, size, now)

    def _index(self, stream: str) -> int:
        index = self._streams.get(stream)
        if index is None:
            check_name("stream", stream)
            self._memory.set_stream(len(self._streams), stream)
            index = self._streams[stream] = len(self._streams)
        return index

    def declare(self) -> None:
        """Puts the marks that are due into the ring, and does not wait for the log. Raises as `append_at` does."""
        with self._pushing:
            for stream in self.unlogged.streams:
                self.raise_pending()
                self._declared(stream, wait=True)

    def _declared(self, stream: str, wait: bool) -> bool:
        """(holding `_pushing`) Puts the stream's due mark, if any, into the ring before its next record. Returns False
        if there is no room and `wait` is False."""
        due = self.unlogged.due(stream)
        if due is not None:
            header = header_of(self._index(stream), due, MARK_DTYPE, MARK_SHAPE, 0)
            if self._producer.push(header, self._memory.address, 0, True) < 0:
                if not wait:
                    return False
                self._push_later(header, self._memory.address, 0, True)
            self.unlogged.marked(stream)
        return True

    def _push_later(self, header: bytes, address: int, size: int, now: bool) -> int:
        """Waits for room, then pushes. Raises LogUnavailable if no acknowledgement arrives within the patience."""
        tail, moved = self._memory.load(Word.TAIL), (began := time.monotonic())
        try:
            while True:
                self._borrower.finish()
                self._memory.store(Word.PRODUCER_WAITS, 1)
                with self.changed:
                    if (end := self._producer.push(header, address, size, now)) >= 0:
                        return end
                    self.changed.wait(POLL_S)
                    self.raise_pending()
                if self._memory.load(Word.TAIL) != tail:
                    tail, moved = self._memory.load(Word.TAIL), time.monotonic()
                waited_s = time.monotonic() - moved
                if waited_s > self._patience_s + 2 * POLL_S:
                    raise LogUnavailable(f"the log has acknowledged nothing for {waited_s:.0f} s")
        finally:
            self._blocked_seconds += time.monotonic() - began

    def lend_ring(self, borrower: Borrower) -> tuple[Memory, Producer]:
        """Lends the ring to a borrower that writes bodies itself (see Producer); they are appended at address 0. Only
        one borrower is allowed."""
        assert self._borrower is NOBODY
        self._borrower = borrower
        return self._memory, self._producer

    def wait_copied(self) -> None:
        """Waits until all appended bodies are copied, so that the caller may reuse them. Never waits for the log."""
        with self._pushing:
            if self._stats is None:
                self._borrower.finish()
                self._producer.wait(self._producer.reserved)

    def flush(self, timeout_s: float) -> None:
        """Waits until all records are durable. Raises ServiceError after `timeout_s`, and as `append_at` does."""
        self.declare()
        self.wait_copied()
        self._flush_to(self.copied, timeout_s)

    def restart(self, generation: int) -> None:
        """(after a fence and admin.reset: all ranks restore a checkpoint) As set_generation, but drops unacknowledged
        records and all knowledge of the log's content."""
        self.wait_copied()
        with self._pushing:
            self.unlogged.forget()
        self._restart(generation, self.copied)

    def forget_below(self, step: int) -> None:
        """Forgets the keys of older steps, which will not be appended again."""
        with self._mapped:
            if self._stats is not None:
                return
            self._memory.store(Word.FLOOR_AT, self._producer.reserved)
            self._memory.store(Word.FLOOR, step)
            os.eventfd_write(self._wake, 1)  # a step is done: the sidecar sends its records
        self._forget_expected(step)

    def close(self, flush_timeout_s: float = 10.0) -> None:
        """Flushes, unless the timeout is 0, and ends the sidecar. Raises the errors of `flush`, after ending it."""
        if self._closed:
            return
        try:
            if flush_timeout_s > 0:
                self.flush(flush_timeout_s)
        finally:
            self._end()
            self._borrower.let_go()
            with self._pushing, self._mapped:
                self._free_ring()

    def _free_ring(self) -> None:
        self._producer.close()
        os.close(self._wake)
        self._stats = self._counted()
        self._memory.close()
