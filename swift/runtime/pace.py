"""How far a replay is, and how long it will still take: for the trace, and for the coordinator, whom operators ask."""

import time
from collections.abc import Callable

from swift import events
from swift._pb import coordinator_pb2 as pb

SAID_EVERY_S = 0.5
STEPS_MIN = 2
"""So many steps tell a pace; the first of them does not count, in which shapes are inferred."""


class Pace:
    """(trainer's thread) ``at`` behind every step; (any thread) ``progress``."""

    def __init__(
        self,
        rank: int,
        first: int,
        target: int,
        predicted_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`predicted_s`: of the plan, for all steps."""
        self._rank, self._first, self._target = rank, first, target
        self._predicted_s = predicted_s
        self._clock = clock
        self._began = self._warm_at = clock()
        self._last = (first, self._began)
        """The newest version, and since when."""
        self._say()

    def at(self, version: int) -> None:
        now = self._clock()
        if version == self._first + 1:
            self._warm_at = now
        self._last = (version, now)
        if now - self._said >= SAID_EVERY_S:
            self._say()

    def progress(self) -> pb.ReplayProgress:
        version, _ = self._last
        return pb.ReplayProgress(version=version, target=self._target, seconds_left=self.seconds_left())

    def seconds_left(self) -> float | None:
        """None: no pace yet, and no prediction."""
        (version, at), now = self._last, self._clock()
        done = version - self._first
        if done >= STEPS_MIN:
            each = (at - self._warm_at) / (done - 1)
            return max(0.0, each * (self._target - version) - (now - at))
        if self._predicted_s is None:
            return None
        return max(0.0, self._predicted_s - (now - self._began))

    def _say(self) -> None:
        self._said = self._clock()
        version, _ = self._last
        events.emit(
            "replay_progress",
            rank=self._rank,
            version=version,
            target=self._target,
            steps_left=self._target - version,
            seconds_left=self.seconds_left(),
        )
