"""The places of this machine that wait for a process: none gets one before its health check has passed.

    (agent) ``add``: its process has ended, another one is wanted → the loop goes on → ``ready``: it is time, and the
            check has passed; or ``failed``: it has not, and the agent decides: ``put_off``, or ``drop``

A place is identified by its local rank.
"""

import contextlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from swift_ft import events
from swift_ft.errors import ServiceError, UsageError
from swift_ft.launch.children import Child, Nursery, dying_with_launcher
from swift_ft.launch.decisions import describe_exit
from swift_ft.text import last_line

LIMIT_S_DEFAULT = 30.0
_OUTPUT_BYTES = 4096
"""Bytes at the end of a check's output in which its last line is searched."""
KILL_WAIT_S = 2.0
"""Seconds that a killed check may take to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthCheck:
    """The operator's command (`swift-ft run --health-check`). Exit code 0: the place is fit."""

    words: tuple[str, ...]
    """The command and its arguments."""
    limit_s: float

    @classmethod
    def parse(cls, text: str, limit_s: float) -> "HealthCheck":
        named = f"run: --health-check {text}"
        if not 0 < limit_s < 86400:
            raise UsageError(f"run: --health-check-s {limit_s:g}: seconds, more than 0")
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise UsageError(f"{named}: {error}") from None
        if not words:
            raise UsageError("run: --health-check: name a command")
        if shutil.which(words[0]) is None:
            there = os.sep in words[0] and os.path.isfile(words[0])
            raise UsageError(f"{named}: {'it is not executable' if there else 'there is no such command'}")
        return cls(words=words, limit_s=limit_s)


class Check:
    """One run, in a session of its own. Started by the launcher's main thread, with which it dies."""

    def __init__(self, check: HealthCheck, environment: Mapping[str, str]) -> None:
        self.limit_s = check.limit_s
        self._began = events.now()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed at the end of the check)
        self._process = subprocess.Popen(
            dying_with_launcher(check.words),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def left_s(self) -> float:
        return self._began + self.limit_s - events.now()

    def end(self, why: str = "") -> str:
        """Reaps it, after killing the processes left in its session. `why`: the reason if it had to be killed. Returns
        how the check ended, and its last line of output; empty if the place is fit."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        try:
            exit_code = self._process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:  # it hangs in the kernel; subprocess reaps it later
            exit_code = -signal.SIGKILL
        os.close(self.pidfd)
        line = self._last_line()
        if exit_code == 0 and not why:
            return ""
        return ": ".join(filter(None, [why or describe_exit(exit_code), line]))

    def _last_line(self) -> str:
        with self._output as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - _OUTPUT_BYTES))
            return last_line(output.read().decode(errors="replace"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    lost: Child
    """Its last process, which may not have left its ports, files and devices yet."""
    at: float
    """The earliest time; infinite while it is being checked."""
    reason: str
    """How its last process ended."""
    generation: int
    """The generation in which its last process ended."""
    fit: bool = False
    """It has passed the health check, or there is none."""
    failures: int = 0
    """Failed health checks and starts since its last process ended."""


class WaitingPlaces:
    def __init__(
        self,
        check: HealthCheck | None,
        nursery: Nursery,
        environment: Callable[[int], Mapping[str, str]],
    ) -> None:
        """Initializes without waiting places. `check`: None: every place is fit. `environment`: variables of a place,
        on top of the launcher's own."""
        self._check = check
        self._nursery = nursery
        self._environment = environment
        self._waiting: dict[int, Waiting] = {}
        self._running: dict[int, Check] = {}
        self._ended: list[tuple[int, str]] = []
        """Place, and why it is not fit."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, local_rank: object) -> bool:
        return local_rank in self._waiting

    def add(self, local_rank: int, lost: Child, *, at: float, reason: str, generation: int) -> None:
        self._waiting[local_rank] = Waiting(
            lost=lost, at=at, reason=reason, generation=generation, fit=self._check is None
        )

    def put_off(self, local_rank: int, at: float) -> None:
        self._waiting[local_rank] = replace(self._waiting[local_rank], at=at)

    def requeue(self, local_rank: int, waiting: Waiting) -> int:
        failures = waiting.failures + 1
        self._waiting[local_rank] = replace(waiting, failures=failures)
        return failures

    def drop(self, local_rank: int) -> Waiting:
        return self._waiting.pop(local_rank)

    def leave(self, local_ranks: Iterable[int]) -> None:
        for local_rank in local_ranks:
            self._waiting.pop(local_rank, None)

    def clear(self) -> None:
        self._waiting.clear()

    def patience_s(self, longest_s: float) -> float:
        now = events.now()
        waits = [waiting.at - now for waiting in self._waiting.values() if waiting.lost.gone]
        return max(0.0, min([longest_s, *waits, *(check.left_s for check in self._running.values())]))

    def ready(self) -> Iterator[tuple[int, Waiting]]:
        """Yields the places that get a process now. Begins the health checks that are due."""
        for local_rank, waiting in list(self._waiting.items()):
            if waiting.at > events.now() or not waiting.lost.gone:
                continue
            if waiting.fit:
                del self._waiting[local_rank]
                yield local_rank, waiting
            else:
                self.put_off(local_rank, math.inf)
                self._begin(local_rank, "replacement")

    def failed(self) -> Iterator[tuple[int, str, int]]:
        """Yields (place, reason, failures since its last process) of the health checks that failed since the last
        call."""
        self._end_late()
        ended, self._ended = self._ended, []
        for local_rank, unfit in ended:
            waiting = self._waiting.get(local_rank)
            if waiting is None:  # the place does not wait any more
                continue
            failures = waiting.failures + bool(unfit)
            self._waiting[local_rank] = replace(waiting, at=events.now(), fit=not unfit, failures=failures)
            if unfit:
                yield local_rank, unfit, failures

    def check_all(self, count: int, patience_s: float, look_around: Callable[[], None]) -> None:
        """Waits for the health checks of all places, before any process is started. Raises ServiceError if one is
        unfit, so that this machine takes no part in the job."""
        if self._check is None:
            return
        for local_rank in range(count):
            self._begin(local_rank, "start")
        while self._running:
            self._nursery.wait(self.patience_s(patience_s))
            self._end_late()
            look_around()
        ended, self._ended = sorted(self._ended), []
        unfit = [f"local rank {number}: {why}" for number, why in ended if why]
        if unfit:
            raise ServiceError(f"run: the health check has failed: {'; '.join(unfit)}")

    def stop(self) -> None:
        for local_rank in list(self._running):
            self._end(local_rank, "it was told to stop")

    def _end_late(self) -> None:
        for local_rank, check in list(self._running.items()):
            if check.left_s <= 0:
                self._end(local_rank, f"it took longer than {check.limit_s:g} s")

    def _begin(self, local_rank: int, because: str) -> None:
        assert self._check is not None
        env = {**os.environ, **self._environment(local_rank), "SWIFT_HEALTH_CHECK": because}
        try:
            check = self._running[local_rank] = Check(self._check, env)
        except OSError as error:
            self._note(local_rank, f"it cannot be started: {error.strerror}")
            return
        self._nursery.attend(check.pidfd, lambda: self._end(local_rank))

    def _end(self, local_rank: int, why: str = "") -> None:
        check = self._running.pop(local_rank)
        self._nursery.ignore(check.pidfd)
        self._note(local_rank, check.end(why))

    def _note(self, local_rank: int, unfit: str) -> None:
        self._ended.append((local_rank, unfit))
        self._nursery.wake()
        events.emit("place_checked", local_rank=local_rank, fit=not unfit, reason=unfit)
