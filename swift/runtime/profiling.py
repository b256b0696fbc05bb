"""What each step of a rank has cost: the seconds of its stages, and what it has given to the log.

Off unless ``SWIFT_PROFILE=1``: then every step ends with an event ``profiled``, from which the drill makes what the
planner (`swift.plan`) takes. Seconds are on the wall clock, without any wait for a neighbour or the log.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from swift import events

ENV_PROFILE = "SWIFT_PROFILE"


class StepProfile:
    """(engine) ``begin``; (stages, channel) ``computing``, ``settled``, ``logged``, ``read``; (engine) ``end``."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._on = os.environ.get(ENV_PROFILE) == "1"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._logged: Counter[str] = Counter()
        self._read = [0.0, 0.0]
        self._settled_at = 0.0

    def begin(self) -> None:
        self._seconds.clear()
        self._logged.clear()
        self._read = [0.0, 0.0]
        self.settled()

    def computing(self, stage: int, direction: str) -> AbstractContextManager[None]:
        """Around what a stage computes for one microbatch."""
        return self._timed(f"s{stage}.{direction}") if self._on else nullcontext()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began
        self.settled()

    def settled(self) -> None:
        """Nobody else is waited for from here on: what follows up to the end of the step is the update."""
        if self._on:
            self._settled_at = time.perf_counter()

    def logged(self, stream: str, size: int) -> None:
        """A record of so many raw bytes was given to the log."""
        if self._on:
            self._logged[stream] += size

    def read(self, size: int, waited_s: float) -> None:
        """(replay) So many bytes came out of the log, after so long a wait."""
        self._read[0] += size
        self._read[1] += waited_s

    def end(self, step: int, *, replay: bool) -> None:
        if self._on:
            events.emit(
                "profiled",
                rank=self._rank,
                step=step,
                replay=replay,
                seconds=dict(self._seconds),
                update_s=time.perf_counter() - self._settled_at,
                logged=dict(self._logged),
                read=self._read,
            )
