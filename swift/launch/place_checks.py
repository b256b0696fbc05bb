"""The places of this machine that wait for a process: none gets one before the health check says that it is fit.

    (agent) ``add``: its process has ended, another one is wanted → the loop goes on → ``ready``: it is time, and the
            place is fit; or ``failed``: it is not, and the agent says what follows: ``put_off``, or ``drop``

A place is known by its local rank.
"""

import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from swift import events
from swift.errors import ServiceError
from swift.launch.children import Nursery
from swift.launch.health import Check, HealthCheck, Result, stop_all
from swift.launch.torch_names import Worker


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
