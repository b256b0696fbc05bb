"""The writing end of the log for a trainer: a ring in shared memory, and the sidecar that empties it."""

import json
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from swift import events
from swift.errors import LogInterrupted, LogUnavailable, ServiceError, SwiftError, UsageError
from swift.log.choice import Choice
from swift.log.lending import NOBODY, Borrower
from swift.log.memory import address_of
from swift.log.placement import COPIES_MAX, PATIENCE_S
from swift.log.record import DIMS_MAX, DTYPE_BY_NAME, RecordKey, check_name
from swift.log.ring import HEADER_BYTES, Memory, Producer, Word, header_of, producer
from swift.log.sidecar_messages import Expectations, Message, error_from_json, expectations
from swift.log.sidecar_process import Stopped, spawn
from swift.log.stats import WriterStats
from swift.log.unlogged import MARK_DTYPE, MARK_SHAPE, Unlogged
from swift.log.writer import check_options, check_record

ENV_OFF = "SWIFT_NO_SIDECAR"
"""Set to 1: records are sent by threads of the trainer's own process."""
_POLL_S, _ANSWER_S, _RESTARTS_MAX, _RESTARTS_WITHIN_S = 0.25, 60.0, 5, 10.0


class SidecarWriter:
    """The same calls as `LogWriter`'s, but the work is done by another process.

    `append` and `append_at` put a record into the ring, a matter of microseconds, and a native thread copies its
    body. What was given to them must stay as it is until `settle`, or until `copied` has passed the position that
    `append_at` has returned; then it is the caller's again.

    A sidecar that dies is replaced by another one, which goes on with the same ring; so it is, on purpose, when a new
    generation brings other servers. One that outlives its trainer sends what the ring holds, for at most 10 s.
    """

    module = "swift.log.sidecar"  # the program that is started

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
        """`lease`: which one the sidecar keeps besides (`swift.log.lease`)."""
        check_options(servers, job, codec, fsync, queue_bytes, patience_s, when_full)
        self.job = job
        self.generation = generation
        self.restarts = self._coming = self._number = 0
        self._servers: dict[str, int] = {}
        """Those that keep the streams -> their numbers in the ring (`swift.log.ring.Memory.assign`)."""
        self._renumber(servers)
        self._begin: Message = {
            "job": job,
            "codec": codec if isinstance(codec, str) else dict(codec),
            "fsync": fsync if isinstance(fsync, str) else dict(fsync),
            "patience_s": patience_s,
            "name": name,
            "lease": None if lease is None else dict(lease),
        }
        self._name = name
        self._patience_s = patience_s
        self._cond = threading.Condition()
        self._pushing = threading.Lock()
        # Held by who reads the ring's words, until `_stats` says that it is gone.
        self._mapped = threading.Lock()
        self.drops = when_full == "drop"
        self.unlogged = Unlogged(self._pushing)
        self._sending = threading.Lock()
        self._replacing = threading.Lock()
        self._dead: SwiftError | None = None  # there is no sidecar, and there will be none
        self._error: SwiftError | None = None  # until the next generation
        self._trouble: SwiftError | None = None  # until the sidecar says otherwise
        self._interrupted = self._closed = False
        self._last_words = ""
        self._waiting: dict[int, Message] = {}  # requests without an answer
        self._answers: dict[int, SwiftError | None] = {}
        self._blocked_seconds = 0.0
        self._choices: dict[str, Choice] = {}
        self._expected = Expectations()
        self._streams: dict[str, int] = {}
        self._lent: deque[tuple[int, object]] = deque()
        self._deaths: deque[float] = deque()
        self._moving = False  # the sidecar was ended on purpose
        self._stopped = Stopped()
        self._stats: WriterStats | None = None  # once it is closed
        self._borrower = NOBODY
        self._memory = Memory.create(queue_bytes)
        self._urgent = self.drops  # who drops records waits for no others
        self._memory.store(Word.URGENT, self._urgent)
        self._largest = self._memory.capacity - HEADER_BYTES
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._producer = producer(self._memory, self._wake)
        self._start()
        self._listener = threading.Thread(target=self._listen, name=f"log-sidecar-{name or job}", daemon=True)
        self._listener.start()

    # -- the caller's side ----------------------------------------------------------------------------

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
    def queued_bytes(self) -> int:
        """What the ring holds that the log has not acknowledged."""
        with self._mapped:
            return 0 if self._stats is not None else self._producer.reserved - self._memory.load(Word.TAIL)

    @property
    def codec_choices(self) -> dict[str, Choice]:
        with self._cond:
            return dict(self._choices)

    @property
    def lending(self) -> "SidecarWriter":
        return self

    @property
    def pid(self) -> int:
        """Of the sidecar."""
        return self._process.pid

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
        """As `LogWriter.append`; ``body`` must not change until `settle`."""
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
            self._raise_pending(may_drop)
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
                self._raise_pending()
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
                with self._cond:
                    if (end := self._producer.push(header, address, size, now)) >= 0:
                        return end
                    self._cond.wait(_POLL_S)
                    self._raise_pending()
                if self._memory.load(Word.TAIL) != tail:
                    tail, moved = self._memory.load(Word.TAIL), time.monotonic()
                waited_s = time.monotonic() - moved
                if waited_s > self._patience_s + 2 * _POLL_S:
                    raise LogUnavailable(f"the log has acknowledged nothing for {waited_s:.0f} s")
        finally:
            self._blocked_seconds += time.monotonic() - began

    def lend_ring(self, borrower: Borrower) -> tuple[Memory, Producer]:
        """For bodies that somebody else writes (see Producer), appended at address 0. There is one borrower."""
        assert self._borrower is NOBODY
        self._borrower = borrower
        return self._memory, self._producer

    def settle(self) -> None:
        """Returns when everything that was appended belongs to the caller again; takes no longer than the copies."""
        with self._pushing:
            if self._stats is None:
                self._borrower.finish()
                self._producer.wait(self._producer.reserved)
            self._lent.clear()

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """As `LogWriter.expect`."""
        check_name("stream", stream)
        for one in [server] if server else list(self._servers):
            with self._cond:  # a successor of the sidecar is told too
                self._expected.add(stream, one, digests)
            for message in expectations(stream, one, digests):
                self._request(message)

    def flush(self, timeout_s: float) -> None:
        """As `LogWriter.flush`."""
        self.declare()
        self.settle()
        with self._cond:
            self._raise_pending()
        self._request(
            {"do": "flush", "upto": self.copied, "timeout_s": timeout_s},
            timeout_s + _ANSWER_S,
            callable_off=True,
        )

    def interrupt(self) -> None:
        """As `LogWriter.interrupt`."""
        with self._cond:
            self._interrupted = True
            self._cond.notify_all()

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        """As `LogWriter.set_generation`."""
        if generation >= self.generation and servers and (emptied or set(servers) != set(self._servers)):
            self._move(generation, servers, emptied)
        self._enter(generation, {"do": "set_generation", "generation": generation})

    def _move(self, generation: int, servers: Sequence[str], emptied: Collection[str]) -> None:
        """The sidecar's successor begins with these servers; what the ring holds is sent to those that lack it."""
        with self._replacing:
            with self._cond:
                if self._closed:
                    self._raise_pending()
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

    def restart(self, generation: int) -> None:
        """As `LogWriter.restart`."""
        self.settle()
        with self._pushing:
            self.unlogged.forget()
        with self._cond:
            if self._closed:
                self._raise_pending()
            self._expected.clear()
        self._enter(generation, {"do": "restart", "generation": generation, "upto": self.copied})

    def _enter(self, generation: int, message: Message) -> None:
        if generation < self.generation:
            raise UsageError(f"generation {generation} is older than {self.generation}")
        with self._cond:
            self.generation = generation  # of a successor of the sidecar, too
            self._interrupted = False
            self._request(message)

    def await_ready(self) -> None:
        """Returns once the sidecar works. Nobody has to wait for it, but a trainer that begins can."""
        self._request({"do": "go"})

    def forget_below(self, step: int) -> None:
        """As `LogWriter.forget_below`."""
        with self._mapped:
            if self._stats is not None:
                return
            self._memory.store(Word.FLOOR_AT, self._producer.reserved)
            self._memory.store(Word.FLOOR, step)
            os.eventfd_write(self._wake, 1)  # a step is done: its records go out
        with self._cond:
            # What waits in the ring may still be compared, by a successor: it asks the server.
            self._expected.forget_below(step)

    def close(self, flush_timeout_s: float = 10.0) -> None:
        """As `LogWriter.close`; the sidecar has ended when this returns."""
        if self._closed:
            return
        try:
            if flush_timeout_s > 0:
                self.flush(flush_timeout_s)
        finally:
            with self._replacing, self._cond:
                self._closed = True
                self._cond.notify_all()
            self._send({"id": 0, "do": "close"})
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._listener.join(5.0)
            self._line.close()
            self._borrower.let_go()
            with self._pushing, self._mapped:
                self._producer.close()
                os.close(self._wake)
                self._stats = self._counted()
                self._memory.close()

    def _raise_pending(self, may_drop: bool = False) -> None:
        """``may_drop``: a log that takes nothing is no reason."""
        if self._closed:
            raise ServiceError("this log writer is closed")
        if self._interrupted:
            raise LogInterrupted("the log writer was interrupted: a new generation is being formed")
        trouble = None if may_drop and isinstance(self._trouble, LogUnavailable) else self._trouble
        error = self._dead or self._error or trouble
        if error is not None:
            raise error

    # -- the sidecar ----------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._process, line = spawn(self.module, self._memory.fd, self._wake)
        except OSError as error:
            raise ServiceError(f"the log's sidecar cannot be started: {error}") from None
        with self._cond:
            self._line = line  # within the lock: nobody's request may come before the beginning
            again = self._waiting.values()
            dropped = max((one["upto"] for one in again if one["do"] == "restart"), default=None)
            first = {"do": "begin", "generation": self.generation, "dropped": dropped, **self._begin}
            first["servers"] = self._servers
            for message in (first, *self._expected.messages(), *again, {"do": "go"}):
                self._send({"id": 0, **message})
        events.emit("sidecar_started", name=self._name, sidecar_pid=self._process.pid, restarts=self.restarts)

    def _send(self, message: Message) -> None:
        with self._sending:
            try:
                self._line.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return  # it is dead: `_listen` says it again to its successor

    def _request(self, message: Message, timeout_s: float = _ANSWER_S, callable_off: bool = False) -> None:
        """Raises what the sidecar answers."""
        deadline = time.monotonic() + timeout_s
        with self._cond:
            self._number += 1
            number = self._number
            self._waiting[number] = {"id": number, **message}
            self._send(self._waiting[number])
            try:
                while number not in self._answers:
                    if self._closed or callable_off:
                        self._raise_pending()
                    if self._dead is not None:
                        raise self._dead
                    if time.monotonic() > deadline:
                        raise LogUnavailable(f"the log's sidecar does not answer within {timeout_s:g} s")
                    self._stopped.look(self._process)  # its successor is asked again
                    self._cond.wait(_POLL_S)
                error = self._answers.pop(number)
            finally:
                del self._waiting[number]
        if error is not None:
            raise error

    def _listen(self) -> None:
        while True:
            with self._line.makefile("rb") as lines:
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
            with self._cond:
                self._trouble, self._dead = None, problem
                self._cond.notify_all()
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
        with self._cond:
            if "trouble" in message:
                error = error_from_json(message["trouble"])
                if error is not None and message["final"]:
                    if self._error is None:
                        self.unlogged.refuse(error)
                        self._error = error
                else:
                    self._trouble = error
            elif "codec" in message:
                self._choices[message["stream"]] = Choice(message["codec"], message["reason"])
            elif "failed" in message:
                self._last_words = message["failed"]
            elif message.get("id") in self._waiting:
                error = self._answers[message["id"]] = error_from_json(message["error"])
                if error is None and self._waiting[message["id"]]["do"] in ("set_generation", "restart"):
                    self._error = self._trouble = None
            self._cond.notify_all()
