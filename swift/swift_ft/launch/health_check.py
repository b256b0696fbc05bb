"""The places of this machine that wait for a process: none gets one before the health check says that it is fit.

    (agent) ``add``: its process has ended, another one is wanted → the loop goes on → ``ready``: it is time, and the
            place is fit; or ``failed``: it is not, and the agent says what follows: ``put_off``, or ``drop``

A place is known by its local rank.
"""

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder

from swift_ft import events
from swift_ft.errors import ServiceError, UsageError
from swift_ft.launch.check_runner import KILL_WAIT_S, PYTHON
from swift_ft.launch.children import Nursery
from swift_ft.launch.torch_names import Worker
from swift_ft.text import one_line

# The health check that an operator names (`swift-ft run --health-check`): what it is, and one run of it.
#
# (plan)     ``HealthCheck.parse``: what cannot be run is refused before anything is started
# (agent)    ``Check``: one run, for one place of this machine, in a process of its own
#            (`swift_ft.launch.check_runner`); readable once it has ended, then ``end`` has the result

LIMIT_S_DEFAULT = 30.0
STOP_S = KILL_WAIT_S + 1.0
"""How long a check that is told to stop may take to end what it has started."""
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthCheck:
    """Exit code 0: the place is fit. Everything else: it is not."""

    words: tuple[str, ...]
    """A command and its arguments, or one ``python:module:function``."""
    limit_s: float
    path0: str
    """Where a module is looked for first, as the script's own are."""

    @classmethod
    def parse(cls, text: str, limit_s: float, path0: str) -> "HealthCheck":
        """UsageError: there is no such command or module."""
        named = f"run: --health-check {text}"
        if not 0 < limit_s < 86400:
            raise UsageError(f"run: --health-check-s {limit_s:g}: seconds, more than 0")
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise UsageError(f"{named}: {error}") from None
        if not words:
            raise UsageError("run: --health-check: name a command, or python:MODULE:FUNCTION")
        if words[0].startswith(PYTHON):
            target = words[0].removeprefix(PYTHON)
            if len(words) > 1 or not _TARGET.fullmatch(target):
                raise UsageError(f"{named}: write python:MODULE:FUNCTION, without arguments")
            top = re.split(r"[.:]", target)[0]
            if top not in sys.builtin_module_names and not PathFinder.find_spec(top, [path0, *sys.path]):
                raise UsageError(f"{named}: there is no such module")
        elif shutil.which(words[0]) is None:
            there = os.sep in words[0] and os.path.isfile(words[0])
            why = "it is not executable" if there else "there is no such command"
            raise UsageError(f"{named}: {why}")
        return cls(words=words, limit_s=limit_s, path0=path0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How one check went."""

    fit: bool
    reason: str = ""
    """Why not: how it ended, and its last line of output."""
    seconds: float = 0.0


class Check:
    """One run. Started and ended in the launcher's main thread, with which it dies."""

    def __init__(self, check: HealthCheck, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "swift_ft.launch.check_runner"]
        command += [str(os.getpid()), str(check.limit_s), check.path0, *check.words]
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        """Readable once it has ended."""
        return self._pidfd

    def end(self) -> Result:
        """Once it has ended: reaps it."""
        said, _ = self._process.communicate()
        os.close(self._pidfd)
        try:
            told = json.loads(said)
            return Result(
                fit=told["fit"] is True, reason=one_line(told["reason"]), seconds=float(told["seconds"])
            )
        except (ValueError, KeyError, TypeError):
            return Result(fit=False, reason=f"nobody ran it to its end ({self._process.returncode})")


def stop_all(checks: Iterable[Check]) -> None:
    """Ends them, with all that they have started; reaps them."""
    stopped = list(checks)
    for check in stopped:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(check.fileno(), signal.SIGTERM)
    for check in stopped:
        try:
            check._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            check._process.kill()
        check.end()


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A place without a process, which gets another one."""

    at: float
    """Not before; infinite: it is being checked."""
    reason: str
    """Why it has none."""
    generation: int
    """In which its last one has ended."""
    incarnation: str
    """Of its last one."""
    fit: bool = False
    """It has passed the health check, or there is none."""
    failures: int = 0
    """Of health checks and of starts of a process, since its last one has ended."""


class WaitingPlaces:
    """Of one machine, by local rank."""

    def __init__(
        self,
        check: HealthCheck | None,
        nursery: Nursery,
        environment: Callable[[int], Mapping[str, str]],
    ) -> None:
        """`check`: None: every place is fit. `environment`: of a place, on top of the launcher's own."""
        self._check = check
        self._nursery = nursery
        self._environment = environment
        self._waiting: dict[int, Waiting] = {}
        self._running: dict[int, Check] = {}
        self._ended: list[tuple[int, Result]] = []

    def __bool__(self) -> bool:
        """Some place waits."""
        return bool(self._waiting)

    def __contains__(self, local_rank: object) -> bool:
        return local_rank in self._waiting

    def add(self, local_rank: int, at: float, reason: str, generation: int, incarnation: str) -> None:
        self._waiting[local_rank] = Waiting(
            at=at,
            reason=reason,
            generation=generation,
            incarnation=incarnation,
            fit=self._check is None,
        )

    def put_off(self, local_rank: int, at: float) -> None:
        """Its next health check, or process, is not before then."""
        self._waiting[local_rank] = replace(self._waiting[local_rank], at=at)

    def put_back(self, local_rank: int, waiting: Waiting) -> int:
        """It was ready, and no process could be started. How often something has failed since its last one."""
        failures = waiting.failures + 1
        self._waiting[local_rank] = replace(waiting, failures=failures)
        return failures

    def drop(self, local_rank: int) -> Waiting:
        """It gets no process."""
        return self._waiting.pop(local_rank)

    def leave(self, vacant: Container[int], workers: Iterable[Worker]) -> None:
        """The places of those ranks get no process, if they wait for one."""
        for worker in workers:
            if worker.global_rank in vacant:
                self._waiting.pop(worker.local_rank, None)

    def clear(self) -> None:
        """None of them gets one."""
        self._waiting.clear()

    def patience_s(self, longest_s: float) -> float:
        """How long the loop may wait for something to happen."""
        now = events.now()
        return min([longest_s, *(max(0.0, waiting.at - now) for waiting in self._waiting.values())])

    def ready(self) -> Iterator[tuple[int, Waiting]]:
        """Those that get a process now. Begins the health checks that are due."""
        for local_rank, waiting in list(self._waiting.items()):
            if waiting.at > events.now():
                continue
            if waiting.fit:
                del self._waiting[local_rank]
                yield local_rank, waiting
            else:
                self.put_off(local_rank, math.inf)
                self._begin(local_rank, "replacement")

    def failed(self) -> Iterator[tuple[int, str, int]]:
        """(place, why, how often since its last process) of the health checks that have failed since this was asked."""
        ended, self._ended = self._ended, []
        for local_rank, result in ended:
            waiting = self._waiting.get(local_rank)
            if waiting is None:  # nobody needs it any more
                continue
            failures = waiting.failures + (not result.fit)
            self._waiting[local_rank] = replace(waiting, at=events.now(), fit=result.fit, failures=failures)
            if not result.fit:
                yield local_rank, result.reason, failures

    def check_all(self, count: int, patience_s: float, look_around: Callable[[], None]) -> None:
        """(before there are processes) Waits for the health checks of all places. ServiceError: one is not fit, so this
        machine takes no part in the job."""
        if self._check is None:
            return
        for local_rank in range(count):
            self._begin(local_rank, "start")
        while self._running:
            self._nursery.wait(patience_s)
            look_around()
        ended, self._ended = sorted(self._ended, key=lambda ended: ended[0]), []
        unfit = [f"local rank {number}: {result.reason}" for number, result in ended if not result.fit]
        if unfit:
            raise ServiceError(f"run: the health check has failed: {'; '.join(unfit)}")

    def stop(self) -> None:
        """Ends the health checks that are under way, with all that they have started."""
        for check in self._running.values():
            self._nursery.ignore(check)
        stop_all(self._running.values())
        self._running.clear()

    def _begin(self, local_rank: int, because: str) -> None:
        assert self._check is not None
        env = {**os.environ, **self._environment(local_rank), "SWIFT_HEALTH_CHECK": because}
        events.emit("place_check_begin", local_rank=local_rank, because=because)
        try:
            check = self._running[local_rank] = Check(self._check, env)
        except OSError as error:
            self._note(local_rank, Result(fit=False, reason=f"it cannot be started: {error.strerror}"))
            return
        self._nursery.attend(check, lambda: self._end(local_rank))

    def _end(self, local_rank: int) -> None:
        check = self._running.pop(local_rank)
        self._nursery.ignore(check)
        self._note(local_rank, check.end())

    def _note(self, local_rank: int, result: Result) -> None:
        self._ended.append((local_rank, result))
        self._nursery.wake()
        told = {"fit": result.fit, "reason": result.reason, "check_s": result.seconds}
        events.emit("place_checked", local_rank=local_rank, **told)
