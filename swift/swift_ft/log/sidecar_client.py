"""What a session writes its log with: one protocol, the two writers behind it, and the choice between them."""

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
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from swift_ft import events
from swift_ft.errors import LogInterrupted, LogUnavailable, ServiceError, SwiftError, UsageError
from swift_ft.log import ring
from swift_ft.log.memory import address_of
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
from swift_ft.log.sender import WriterStats
from swift_ft.log.sidecar import Expectations, Message, error_from_json, expectations, is_running
from swift_ft.log.writer import NOBODY, Borrower, Lending, LogWriter, check_options, check_record

# Starts the process of a sidecar, holds the line to it, and ends one that somebody has stopped.

STOPPED_S = 3.0
"""Whoever was stopped (SIGSTOP, a debugger) and is not continued by then is ended: a recovery waits for its answer."""


class Line:
    """Our end of the line to a sidecar. Nobody who says something waits: one that was stopped reads nothing, and what
    it is told may be more than a socket takes. A thread sends the rest."""

    def __init__(self, ours: socket.socket) -> None:
        """RuntimeError: no thread can be started."""
        self._socket = ours
        self._changed = threading.Condition()
        self._left: deque[bytes] = deque()
        """The first one is being sent."""
        self._closed = False
        threading.Thread(target=self._send, name="log-sidecar-line", daemon=True).start()

    def put(self, data: bytes) -> None:
        """(any thread) Sent in this order; to one that is dead, nothing is."""
        with self._changed:
            if not self._left:
                data = data[self._taken_at_once(data) :]
            if data:
                self._left.append(data)
                self._changed.notify()

    def heard(self) -> BinaryIO:
        """What the sidecar says, to be read by one thread."""
        return self._socket.makefile("rb")

    def close(self) -> None:
        """Nothing is sent any more."""
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
            with contextlib.suppress(OSError):  # it is dead: what is left fails as well
                self._socket.sendall(data)
            with self._changed:
                self._left.popleft()


def spawn(module: str, ring: int, wake: int) -> "tuple[subprocess.Popen[bytes], Line]":
    """The process of that program, and the line to it. ``ring``, ``wake``: file descriptors."""
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
            # It may live longer than this process: nobody must wait for the end of our output on its account.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(fds.values()),
            start_new_session=True,  # a signal to our group is not for it
            env={**os.environ, "PYTHONPATH": ":".join(filter(None, paths))},
        )
        failed.pop_all()
        return process, line


class Stopped:
    """(whoever waits for a sidecar) ``check`` again and again: one that stays stopped is killed, as any may be."""

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None
        """Which process was found stopped, and when."""

    def check(self, process: "subprocess.Popen[bytes]") -> None:
        now = time.monotonic()
        if is_running(process.pid):
            self._since = None
        elif self._since is None or self._since[0] != process.pid:
            self._since = (process.pid, now)
        elif now - self._since[1] > STOPPED_S:
            process.kill()


# Keeps a sidecar working at a trainer's ring: starts it, asks it, and replaces one that dies.
#
# A sidecar that dies is replaced by another one, which goes on with the same ring and is told again what its
# predecessor was: the servers, what they are known to hold, requests without an answer. So it is, on purpose, when a
# new generation brings other servers.

ENV_OFF = "SWIFT_NO_SIDECAR"
"""Set to 1: records are sent by threads of the trainer's own process."""
ANSWER_S = 60.0
POLL_S = 0.25
_RESTARTS_MAX, _RESTARTS_WITHIN_S = 5, 10.0


class SidecarSupervisor:
    """(any thread of the trainer) its calls; (a thread of its own) what the sidecar says, and its end."""

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
        """`module`: the program that is started. `ring`, `wake`: file descriptors. `begin`: what every sidecar of this
        ring is told first. `refused(error)` is called, by another thread, with an error that no successor can mend."""
        self._module = module
        self._ring, self._wake = ring, wake
        self._begin = begin
        self._refused = refused
        self.generation = generation
        self.restarts = self._coming = self._number = 0
        self._servers: dict[str, int] = {}
        """Those that keep the streams -> their numbers in the ring (`swift_ft.log.ring.Memory.assign`)."""
        self._renumber(servers)
        self.changed = threading.Condition()
        """Notified when the sidecar has said anything, or another one has taken its place."""
        self._replacing = threading.Lock()
        self._dead: SwiftError | None = None  # there is no sidecar, and there will be none
        self._error: SwiftError | None = None  # until the next generation
        self._trouble: SwiftError | None = None  # until the sidecar says otherwise
        self._interrupted = self._closed = False
        self._last_words = ""
        self._waiting: dict[int, Message] = {}  # requests without an answer
        self._answers: dict[int, SwiftError | None] = {}
        self._expected = Expectations()
        self._deaths: deque[float] = deque()
        self._moving = False  # the sidecar was ended on purpose
        self._stopped = Stopped()
        self._start()
        name = begin["name"] or begin["job"]
        self._listener = threading.Thread(target=self._listen, name=f"log-sidecar-{name}", daemon=True)
        self._listener.start()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def pid(self) -> int:
        """Of the sidecar."""
        return self._process.pid

    def raise_pending(self, may_drop: bool = False) -> None:
        """``may_drop``: a log that takes nothing is no reason. Raises ServiceError once the writer is closed,
        LogInterrupted while a new generation is formed, and what ails the log."""
        if self._closed:
            raise ServiceError("this log writer is closed")
        if self._interrupted:
            raise LogInterrupted("the log writer was interrupted: a new generation is being formed")
        trouble = None if may_drop and isinstance(self._trouble, LogUnavailable) else self._trouble
        error = self._dead or self._error or trouble
        if error is not None:
            raise error

    def expect(self, stream: str, server: str, digests: Mapping[RecordKey, bytes]) -> None:
        """As `LogWriter.expect`; `server` empty: of each."""
        for holder in [server] if server else list(self._servers):
            with self.changed:  # a successor of the sidecar is told too
                self._expected.add(stream, holder, digests)
            for message in expectations(stream, holder, digests):
                self._request(message)

    def forget_below(self, step: int) -> None:
        """What waits in the ring may still be compared, by a successor: it asks the server."""
        with self.changed:
            self._expected.forget_below(step)

    def flush(self, upto: int, timeout_s: float) -> None:
        """What the ring holds below this position is acknowledged."""
        with self.changed:
            self.raise_pending()
        self._request(
            {"do": "flush", "upto": upto, "timeout_s": timeout_s}, timeout_s + ANSWER_S, callable_off=True
        )

    def await_ready(self) -> None:
        """Returns once the sidecar works."""
        self._request({"do": "go"})

    def interrupt(self) -> None:
        """As `LogWriter.interrupt`."""
        with self.changed:
            self._interrupted = True
            self.changed.notify_all()

    def set_generation(self, generation: int, servers: Sequence[str], emptied: Collection[str]) -> None:
        """As `LogWriter.set_generation`."""
        if generation >= self.generation and servers and (emptied or set(servers) != set(self._servers)):
            self._move(generation, servers, emptied)
        self._enter(generation, {"do": "set_generation", "generation": generation})

    def restart(self, generation: int, upto: int) -> None:
        """As `LogWriter.restart`; what the ring holds below `upto` is dropped."""
        with self.changed:
            if self._closed:
                self.raise_pending()
            self._expected.clear()
        self._enter(generation, {"do": "restart", "generation": generation, "upto": upto})

    def _move(self, generation: int, servers: Sequence[str], emptied: Collection[str]) -> None:
        """The sidecar's successor begins with these servers; what the ring holds is sent to those that lack it."""
        with self._replacing:
            with self.changed:
                if self._closed:
                    self.raise_pending()
                self._renumber(servers, emptied)
                self.generation = generation
                self._expected.keep(self._servers.keys() - emptied)
            self._moving = True
            self._process.kill()
            self._process.wait()  # it answers nothing any more

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
            self.generation = generation  # of a successor of the sidecar, too
            self._interrupted = False
            self._request(message)

    def close(self) -> None:
        """The sidecar has ended when this returns."""
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
            self._line = line  # within the lock: nobody's request may come before the beginning
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
        """Waits for nothing. If the sidecar is dead, `_listen` says it again to its successor."""
        self._line.put(json.dumps(message).encode() + b"\n")

    def _request(self, message: Message, timeout_s: float = ANSWER_S, callable_off: bool = False) -> None:
        """Raises what the sidecar answers."""
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
                    self._stopped.check(self._process)  # its successor is asked again
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
                self._process.kill()  # it may only have lost its socket: there must never be two
                self._process.wait()
                self._line.close()
                problem = self._replace()
            with self.changed:
                self._trouble, self._dead = None, problem
                self.changed.notify_all()
            if problem is not None:
                return

    def _replace(self) -> SwiftError | None:
        """Another sidecar for the same ring; why not, if it dies again and again."""
        if not self._moving:
            self.restarts += 1
            self._deaths.append(time.monotonic())
        self._moving = False
        while self._deaths and self._deaths[0] < self._deaths[-1] - _RESTARTS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) > _RESTARTS_MAX:
            return LogUnavailable(
                f"the log's sidecar has died {len(self._deaths)} times within {_RESTARTS_WITHIN_S:g} s "
                f"(exit code {self._process.returncode}{': ' if self._last_words else ''}{self._last_words}); "
                f"{ENV_OFF}=1 does without it"
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


# The writing end of the log for a trainer: a ring in shared memory, and the sidecar that empties it.


class SidecarWriter:
    """The same calls as `LogWriter`'s, but the work is done by another process.

    `append` and `append_at` put a record into the ring, a matter of microseconds, and a native thread copies its
    body. What was given to them must stay as it is until `wait_copied`, or until `copied` has passed the position that
    `append_at` has returned; then it is the caller's again.

    A `SidecarSupervisor` keeps the sidecar working. One that outlives its trainer sends what the ring holds, for at
    most 10 s.
    """

    module = "swift_ft.log.sidecar"  # the program that is started

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
        lease: Mapping[str, Any] | None = None,
    ) -> None:
        """`lease`: which one the sidecar keeps besides (`swift_ft.log.sidecar`)."""
        check_options(servers, job, codec, fsync, queue_bytes, patience_s, when_full)
        self.job = job
        self._patience_s = patience_s
        self._pushing = threading.Lock()
        # Held by who reads the ring's words, until `_stats` says that it is gone.
        self._mapped = threading.Lock()
        self.drops = when_full == "drop"
        self.unlogged = Unlogged(self._pushing)
        self._blocked_seconds = 0.0
        self._streams: dict[str, int] = {}
        self._lent: deque[tuple[int, object]] = deque()
        self._stats: WriterStats | None = None  # once it is closed
        self._borrower = NOBODY
        self._memory = Memory.create(queue_bytes)
        self._urgent = self.drops  # who drops records waits for no others
        self._memory.store(Word.URGENT, self._urgent)
        self._largest = self._memory.capacity - HEADER_BYTES
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._producer = producer(self._memory, self._wake)
        begin: Message = {
            "job": job,
            "codec": codec if isinstance(codec, str) else dict(codec),
            "fsync": fsync if isinstance(fsync, str) else dict(fsync),
            "patience_s": patience_s,
            "name": name,
            "lease": None if lease is None else dict(lease),
        }
        try:
            self._sidecar = SidecarSupervisor(
                self.module, self._memory.fd, self._wake, servers, generation, begin, self.unlogged.refuse
            )
        except SwiftError:
            self._free_ring()
            raise

    @property
    def stats(self) -> WriterStats:
        """What the log has acknowledged, and what was found equal."""
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
    def generation(self) -> int:
        """Under which it writes."""
        return self._sidecar.generation

    @property
    def restarts(self) -> int:
        """So many sidecars have died, and were replaced."""
        return self._sidecar.restarts

    @property
    def queued_bytes(self) -> int:
        """What the ring holds that the log has not acknowledged."""
        with self._mapped:
            return 0 if self._stats is not None else self._producer.reserved - self._memory.load(Word.TAIL)

    @property
    def lending(self) -> "SidecarWriter":
        return self

    @property
    def pid(self) -> int:
        """Of the sidecar."""
        return self._sidecar.pid

    @property
    def copied(self) -> int:
        """What was appended below this position belongs to the caller again."""
        with self._mapped:
            return self._producer.reserved if self._stats is not None else self._memory.load(Word.HEAD)

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
        """As `LogWriter.append`; ``body`` must not change until `wait_copied`."""
        view = check_record(stream, key, dtype, shape, body)
        end = self.append_at(stream, key, dtype, shape, address_of(view), view.nbytes, keep=keep)
        copied = self.copied
        while self._lent and self._lent[0][0] <= copied:
            self._lent.popleft()
        if end > copied:
            self._lent.append((end, view))
        return end >= 0

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
        """Takes ``size`` bytes at an address into the log; gives the position that `copied` will pass, or -1 if they
        were dropped.

        ``now``: they are copied before this returns, by the caller. While the ring is full, waits or drops them;
        with ``keep`` it waits in any case. Raises as `LogWriter.append` does, and UsageError for a record that is
        larger than the ring.
        """
        may_drop = self.drops and not keep
        with self._pushing:
            self._sidecar.raise_pending(may_drop)
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
            if keep != self._urgent:  # a replay: others may wait for what it gives
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
        """As `LogWriter.declare`."""
        with self._pushing:
            for stream in self.unlogged.streams:
                self._sidecar.raise_pending()
                self._declared(stream, wait=True)

    def _declared(self, stream: str, wait: bool) -> bool:
        """(holding `_pushing`) Puts the mark that is due in front of what comes. False: there is no room."""
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
        """Waits for room."""
        tail, moved = self._memory.load(Word.TAIL), (began := time.monotonic())
        try:
            while True:
                self._borrower.finish()
                self._memory.store(Word.PRODUCER_WAITS, 1)
                with self._sidecar.changed:
                    if (end := self._producer.push(header, address, size, now)) >= 0:
                        return end
                    self._sidecar.changed.wait(POLL_S)
                    self._sidecar.raise_pending()
                if self._memory.load(Word.TAIL) != tail:
                    tail, moved = self._memory.load(Word.TAIL), time.monotonic()
                waited_s = time.monotonic() - moved
                if waited_s > self._patience_s + 2 * POLL_S:
                    raise LogUnavailable(f"the log has acknowledged nothing for {waited_s:.0f} s")
        finally:
            self._blocked_seconds += time.monotonic() - began

    def lend_ring(self, borrower: Borrower) -> tuple[Memory, Producer]:
        """For bodies that somebody else writes (see Producer), appended at address 0. There is one borrower."""
        assert self._borrower is NOBODY
        self._borrower = borrower
        return self._memory, self._producer

    def wait_copied(self) -> None:
        """Returns when everything that was appended belongs to the caller again; takes no longer than the copies."""
        with self._pushing:
            if self._stats is None:
                self._borrower.finish()
                self._producer.wait(self._producer.reserved)
            self._lent.clear()

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """As `LogWriter.expect`."""
        check_name("stream", stream)
        self._sidecar.expect(stream, server, digests)

    def flush(self, timeout_s: float) -> None:
        """As `LogWriter.flush`."""
        self.declare()
        self.wait_copied()
        self._sidecar.flush(self.copied, timeout_s)

    def interrupt(self) -> None:
        """As `LogWriter.interrupt`."""
        self._sidecar.interrupt()

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        """As `LogWriter.set_generation`."""
        self._sidecar.set_generation(generation, servers, emptied)

    def restart(self, generation: int) -> None:
        """As `LogWriter.restart`."""
        self.wait_copied()
        with self._pushing:
            self.unlogged.forget()
        self._sidecar.restart(generation, self.copied)

    def await_ready(self) -> None:
        """Returns once the sidecar works. Nobody has to wait for it, but a trainer that begins can."""
        self._sidecar.await_ready()

    def forget_below(self, step: int) -> None:
        """As `LogWriter.forget_below`."""
        with self._mapped:
            if self._stats is not None:
                return
            self._memory.store(Word.FLOOR_AT, self._producer.reserved)
            self._memory.store(Word.FLOOR, step)
            os.eventfd_write(self._wake, 1)  # a step is done: its records go out
        self._sidecar.forget_below(step)

    def close(self, flush_timeout_s: float = 10.0) -> None:
        """As `LogWriter.close`; the sidecar has ended when this returns."""
        if self._sidecar.closed:
            return
        try:
            if flush_timeout_s > 0:
                self.flush(flush_timeout_s)
        finally:
            self._sidecar.close()
            self._borrower.let_go()
            with self._pushing, self._mapped:
                self._free_ring()

    def _free_ring(self) -> None:
        self._producer.close()
        os.close(self._wake)
        self._stats = self._counted()
        self._memory.close()


class Writer(Protocol):
    """All streams that one rank writes, to each of the servers that keep a copy.

    (channel)   ``append``, or ``lending.append_at``, for every tensor
    (restorer)  ``expect`` → … ``unlogged.lacks`` → ``declare``; ``restart`` where the log begins anew
    (engine)    ``interrupt`` (a notice) → ``set_generation`` → ``flush`` (the report) …; ``forget_below`` after a step

    A record that the log has is compared and not sent; what goes wrong in the background is raised by the next
    ``append`` or ``flush``. `swift_ft.log.writer.LogWriter` says it in full; both do the same.
    """

    drops: bool
    """When the queue is full, records are dropped, and their steps declared unlogged."""
    unlogged: Unlogged
    """What was not logged: asked, and added to, by the engine and the restorer."""

    @property
    def lending(self) -> Lending | None:
        """None: bodies are copied by the caller, for ``append``."""

    @property
    def pid(self) -> int | None:
        """Of the process that does the work; None: this one does."""

    @property
    def stats(self) -> WriterStats:
        """What it has done so far. (any thread)"""

    @property
    def queued_bytes(self) -> int:
        """What waits, and what no server has acknowledged. (any thread)"""

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
        """Takes a tensor into the log; waits while the queue is full. False: it was dropped; never with ``keep``."""

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """What one server, or every one, holds: these keys are compared, and not sent there. RecordCorrupt."""

    def declare(self) -> None:
        """Puts the marks that are due into the queue, and does not wait for the log."""

    def flush(self, timeout_s: float) -> None:
        """Returns when all that was appended is durable. ServiceError in time."""

    def await_ready(self) -> None:
        """Returns once what was appended goes out by itself. Nobody has to wait for it."""

    def interrupt(self) -> None:
        """(any thread) Blocked and later calls of append and flush raise LogInterrupted, until set_generation."""

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        """Goes on under it, with these servers; errors are forgotten, what was not acknowledged comes again."""

    def restart(self, generation: int) -> None:
        """As set_generation, with a log that is empty: nothing comes again, and nothing is known."""

    def forget_below(self, step: int) -> None:
        """Keys of older steps will not come again."""

    def close(self, flush_timeout_s: float = 10.0) -> None:
        """Flushes, unless it is given no time, and ends."""


def open_writer(
    servers: Sequence[str],
    job: str,
    generation: int,
    *,
    lease: Mapping[str, Any] | None = None,
    **options: Any,
) -> Writer:
    """A SidecarWriter, unless it is switched off or the machine cannot have one. `options`: those of `LogWriter`.

    `lease`: which one the sidecar keeps besides (`swift_ft.log.sidecar`); without a sidecar, nobody does.
    """
    if os.environ.get(ENV_OFF) == "1" or not ring.available():
        return LogWriter(servers, job, generation, **options)
    return SidecarWriter(servers, job, generation, lease=lease, **options)
