"""Keeps a sidecar working at a trainer's ring: starts it, asks it, and replaces one that dies.

A sidecar that dies is replaced by another one, which goes on with the same ring and is told again what its predecessor
was: the servers, what they are known to hold, requests without an answer. So it is, on purpose, when a new generation
brings other servers.
"""

import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from swift import events
from swift.errors import LogInterrupted, LogUnavailable, ServiceError, SwiftError, UsageError
from swift.log.choice import Choice
from swift.log.placement import COPIES_MAX
from swift.log.record import RecordKey
from swift.log.sidecar_messages import Expectations, Message, error_from_json, expectations
from swift.log.sidecar_process import Stopped, spawn

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
        """Those that keep the streams -> their numbers in the ring (`swift.log.ring.Memory.assign`)."""
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
        self._choices: dict[str, Choice] = {}
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

    @property
    def codec_choices(self) -> dict[str, Choice]:
        """What "auto" has chosen for each stream."""
        with self.changed:
            return dict(self._choices)

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
        except OSError as error:
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
                    self._stopped.look(self._process)  # its successor is asked again
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
            elif "codec" in message:
                self._choices[message["stream"]] = Choice(message["codec"], message["reason"])
            elif "failed" in message:
                self._last_words = message["failed"]
            elif message.get("id") in self._waiting:
                error = self._answers[message["id"]] = error_from_json(message["error"])
                if error is None and self._waiting[message["id"]]["do"] in ("set_generation", "restart"):
                    self._error = self._trouble = None
            self.changed.notify_all()
