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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

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
from swift_ft.log.sidecar import Message, error_from_json, is_running

STOPPED_S = 3.0
"""Seconds after which a stopped sidecar (SIGSTOP, a debugger) is killed, because a recovery waits for its answer."""
ANSWER_S = 60.0
POLL_S = 0.25
_RESTARTS_MAX, _RESTARTS_WITHIN_S = 5, 10.0
_EXPECT_AT_ONCE = 500

_AHEAD: list[tuple[str, "subprocess.Popen[bytes]", socket.socket]] = []
"""Sidecars that were started before there was a ring, with their programs."""
os.register_at_fork(after_in_child=_AHEAD.clear)  # they are the parent's


def start_ahead(module: str) -> None:
    """(a spare) Starts `module` as a process for the next writer. A recovery would wait until it has imported gRPC,
    which takes longer than to restore a state. Has no effect if there is no process to be had."""
    with contextlib.suppress(OSError):
        _AHEAD.append((module, *_start(module)))


def _start(module: str) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    with contextlib.ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.callback(theirs.close)
        failed = stack.enter_context(contextlib.ExitStack())
        failed.callback(ours.close)
        trainer = os.pidfd_open(os.getpid())
        stack.callback(os.close, trainer)
        fds = {"socket": theirs.fileno(), "trainer": trainer}
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
        return process, ours


def _hand_ring(process: "subprocess.Popen[bytes]", ours: socket.socket, ring: int, wake: int) -> None:
    """Sends the descriptors to a sidecar that was started ahead. Raises OSError if it is dead."""
    try:
        socket.send_fds(ours, [b"\n"], [ring, wake])
    except OSError:
        ours.close()
        process.kill()
        process.wait()
        raise


@dataclass(slots=True)
class WriterStats:
    """Counts since the writer was created."""

    records: int = 0
    """Records that all servers have acknowledged."""
    bytes: int = 0
    """Raw bytes of these records."""
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

    def stop_writing(self) -> None:
        """(the writer is closed) Waits until the borrower has stopped writing."""


class SidecarWriter:
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

    The successor of a dead sidecar continues with the same ring, and asks the servers for what they hold. A sidecar is
    killed and replaced on purpose when a new generation has other servers, or if it does not read. One that outlives
    its trainer sends the ring's records, for at most 10 s.

    All methods may be called by any thread of the trainer. A thread of the writer reads the sidecar's messages and
    notices its death.
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
        the sidecar renews when the trainer does not (`swift_ft.log.sidecar.LeaseKeeper`). Raises UsageError if this
        machine cannot have a ring."""
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
        self._borrower: Borrower | None = None
        self._memory = Memory.create(queue_bytes)
        self._urgent = self.drops  # a writer that drops records does not batch them
        self._memory.store(Word.URGENT, self._urgent)
        self._largest = self._memory.capacity - HEADER_BYTES
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._producer = producer(self._memory, self._wake)
        self._name = name
        self._fields = {"job": job, "codec": codec, "fsync": fsync, "patience_s": patience_s, "name": name}
        self._lease = None if lease is None else dict(lease)
        self.generation = generation
        self.restarts = self._coming = self._number = 0
        self._servers: dict[str, int] = {}
        """Log servers that keep the streams -> their numbers in the ring (`swift_ft.log.ring.Memory.assign`)."""
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
        self._deaths: deque[float] = deque()
        self._moving = False  # the sidecar was killed on purpose
        self._stopped: tuple[int, float] | None = None  # process that was found stopped, and the time
        self._resumed = False  # there was a sidecar before
        self._listener = threading.Thread(target=self._listen, name=f"log-sidecar-{name or job}", daemon=True)
        try:
            self._renumber(servers)
            self._start()
        except SwiftError:
            self._free_ring()
            raise
        try:
            self._listener.start()
        except RuntimeError as error:  # no thread
            self._process.kill()
            self._process.wait()
            self._socket.close()
            self._free_ring()
            raise ServiceError(f"the log's sidecar cannot be started: {error}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

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

    def renewed(self, at_s: float) -> None:
        """(any thread) Tells the sidecar that the trainer has renewed its lease itself, at this monotonic time."""
        with self._mapped:
            if self._stats is None:
                self._memory.store(Word.RENEWED, int(at_s * 1e9))

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
                os.eventfd_write(self._wake, 1)
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
                self._finish_borrowed()
                self._memory.store(Word.PRODUCER_WAITS, 1)
                os.eventfd_write(self._wake, 1)
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
        assert self._borrower is None
        self._borrower = borrower
        return self._memory, self._producer

    def wait_copied(self) -> None:
        """Waits until all appended bodies are copied, so that the caller may reuse them. Never waits for the log."""
        with self._pushing:
            if self._stats is None:
                self._finish_borrowed()
                self._producer.wait(self._producer.reserved)

    def _finish_borrowed(self) -> None:
        if self._borrower is not None:
            self._borrower.finish()

    def flush(self, timeout_s: float) -> None:
        """Waits until all records are durable. Raises ServiceError after `timeout_s`, and as `append_at` does."""
        self.declare()
        self.wait_copied()
        self.raise_pending()
        request = {"do": "flush", "upto": self.copied, "timeout_s": timeout_s}
        self._request(request, timeout_s + ANSWER_S, callable_off=True)

    def forget_below(self, step: int) -> None:
        """Forgets the keys of older steps, which will not be appended again."""
        with self._mapped:
            if self._stats is not None:
                return
            self._memory.store(Word.FLOOR_AT, self._producer.reserved)
            self._memory.store(Word.FLOOR, step)
            os.eventfd_write(self._wake, 1)  # a step is done: the sidecar sends its records

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
        rest = iter(digests.items())
        while part := list(islice(rest, _EXPECT_AT_ONCE)):
            numbers = [[key.step, key.microbatch, key.slot, digest.hex()] for key, digest in part]
            self._request({"do": "expect", "stream": stream, "server": server, "digests": numbers})

    def await_ready(self) -> None:
        """Waits until the sidecar works. Optional, for a trainer at its start."""
        self._request({"do": "go"})

    # -- generations ----------------------------------------------------------------------------------

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

    def restart(self, generation: int) -> None:
        """(after a fence and admin.reset: all ranks restore a checkpoint) As set_generation, but drops unacknowledged
        records and all knowledge of the log's content."""
        self.wait_copied()
        with self._pushing:
            self.unlogged.forget()
        with self.changed:
            if self._closed:
                self.raise_pending()
        self._enter(generation, {"do": "restart", "generation": generation, "upto": self.copied})

    def _move(self, generation: int, servers: Sequence[str], emptied: Collection[str]) -> None:
        """Kills the sidecar, so that its successor begins with these servers. The successor sends the ring's records to
        the servers that lack them."""
        with self._replacing:
            with self.changed:
                if self._closed:
                    self.raise_pending()
                self._renumber(servers, emptied)
                self.generation = generation
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

    # -- the sidecar ----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts a sidecar, or takes the one that was started ahead, and sends it what it needs to begin."""
        environment = {}
        for ahead in [ahead for ahead in _AHEAD if ahead[0] == self.module]:
            _AHEAD.remove(ahead)
            with contextlib.suppress(OSError):  # it has been killed meanwhile
                _hand_ring(*ahead[1:], self._memory.fd, self._wake)
                _, process, ours = ahead
                environment = dict(os.environ)  # it has a spare's
                break
        else:
            try:
                process, ours = _start(self.module)
            except OSError as error:
                raise ServiceError(f"the log's sidecar cannot be started: {error}") from None
            try:
                socket.send_fds(ours, [b"\n"], [self._memory.fd, self._wake])
            except OSError:
                process.kill()  # as in `_send`: it is replaced, or its end is reported
        with self.changed:
            # Within the lock: no request may be sent before "begin".
            self._process, self._socket = process, ours
            again = self._waiting.values()
            dropped = max((request["upto"] for request in again if request["do"] == "restart"), default=None)
            fields = {**self._fields, "generation": self.generation, "servers": self._servers}
            fields |= {"resumed": self._resumed, "dropped": dropped}
            begin = {"do": "begin", "writer": fields, "lease": self._lease, "environment": environment}
            self._resumed = True
            for message in (begin, *again, {"do": "go"}):
                self._send({"id": 0, **message})
        events.emit("sidecar_started", name=self._name, sidecar_pid=self._process.pid, restarts=self.restarts)

    def _send(self, message: Message) -> None:
        """Sends a message without blocking. A sidecar that is dead, or that does not read, is replaced, and requests
        are sent to its successor."""
        data = json.dumps(message).encode() + b"\n"
        try:
            if self._socket.send(data, socket.MSG_DONTWAIT) == len(data):
                return
        except OSError:
            pass
        self._process.kill()

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
                    self._kill_stopped()  # its successor gets the request again
                    self.changed.wait(POLL_S)
                error = self._answers.pop(number)
            finally:
                del self._waiting[number]
        if error is not None:
            raise error

    def _kill_stopped(self) -> None:
        """Kills a sidecar that stays stopped for `STOPPED_S`."""
        process, now = self._process, time.monotonic()
        if is_running(process.pid):
            self._stopped = None
        elif self._stopped is None or self._stopped[0] != process.pid:
            self._stopped = (process.pid, now)
        elif now - self._stopped[1] > STOPPED_S:
            process.kill()

    def _listen(self) -> None:
        while True:
            with self._socket.makefile("rb") as lines:
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
                self._socket.close()
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
                        self.unlogged.refuse(error)
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

    def close(self, flush_timeout_s: float = 10.0) -> None:
        """Flushes, unless the timeout is 0, and ends the sidecar. Raises the errors of `flush`, after ending it."""
        if self._closed:
            return
        try:
            if flush_timeout_s > 0:
                self.flush(flush_timeout_s)
        finally:
            self._end()
            if self._borrower is not None:
                self._borrower.stop_writing()
            with self._pushing, self._mapped:
                self._free_ring()

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
        self._socket.close()

    def _free_ring(self) -> None:
        self._producer.close()
        os.close(self._wake)
        self._stats = self._counted()
        self._memory.close()
