"""Steps that run too long: shown, never acted on. Connections that broke: acted on, unless somebody is found dead."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from services.coordinator.row import JobRow, State
from services.coordinator.timing import Timing

RECENT_STEPS = 32


class StepClock:
    """Learns from heartbeats how long steps take, and says whose step has run past the bound.

    Resolution is the heartbeat interval: several steps between two heartbeats count as equally long.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._at: dict[int, tuple[int, float]] = {}
        """rank -> (version, since when)"""

    def restart(self, versions: Mapping[int, int], now: float) -> None:
        """Training goes on, with each rank at its version: steps begin now. What a heartbeat told before, or what a
        replacement has been given, is no progress from here on."""
        self._at = {rank: (version, now) for rank, version in versions.items()}

    def forget(self, rank: int) -> None:
        self._at.pop(rank, None)

    def see(self, rank: int, version: int, now: float, *, running: bool) -> None:
        known = self._at.get(rank)
        if known is not None and (version == known[0] or (running and version < known[0])):
            return  # a lower one is of before training went on: that took it from there
        if known is not None and running:
            self._recent_s.append((now - known[1]) / (version - known[0]))
        self._at[rank] = (version, now)

    def version(self, rank: int) -> int:
        return self._at.get(rank, (0, 0.0))[0]

    def steps_within(self, seconds: float) -> int:
        """How many steps a rank may begin in so many seconds, going by the quickest of the last ones."""
        shortest_s = min(self._recent_s, default=seconds + 1.0)
        return int(seconds / max(shortest_s, 1e-4))

    @property
    def bound_s(self) -> float:
        longest_s = max(self._recent_s, default=0.0)
        return max(self._timing.step_bound_s, self._timing.step_bound_factor * longest_s)

    def overdue(self, now: float) -> list[tuple[int, float]]:
        """(rank, seconds) of each step past the bound. Empty until a first step was seen to end."""
        if not self._recent_s:
            return []
        return [
            (rank, now - since) for rank, (_, since) in sorted(self._at.items()) if now - since > self.bound_s
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    rank: int
    reason: str
    age_s: float
    told: bool
    """By the rank, of what it met: that says nothing against the rank itself."""
    unfit: bool = False
    """By its launcher: the rank's place has failed the health check."""


class Suspicions:
    """What fences nobody: what ranks said, and steps that run too long."""

    def __init__(self, steps: StepClock) -> None:
        self._steps = steps
        self._said: dict[int, tuple[str, float, int]] = {}
        self._unfit: set[int] = set()

    def say(self, rank: int, reason: str, now: float, generation: int, *, unfit: bool = False) -> bool:
        """False: it has said so before, and does until a newer generation comes."""
        known = self._said.get(rank)
        if known is not None and known[2] == generation and generation:
            return False
        self._said[rank] = (reason, now, generation)
        (self._unfit.add if unfit else self._unfit.discard)(rank)
        return True

    def clear(self) -> None:
        self._said.clear()
        self._unfit.clear()

    def due(self, row: JobRow, older_s: float, now: float) -> str:
        """A connection that broke in this generation, so long ago that a death would be known. Empty: there is none."""
        if row.state not in (State.FORMING, State.RECOVERING, State.RUNNING):
            return ""
        for rank, (reason, at, generation) in sorted(self._said.items()):
            if generation == row.generation and now - at >= older_s:
                return f"rank {rank} has lost a connection, and nobody has died: {reason}"
        return ""

    def all(self, row: JobRow, now: float) -> list[Suspicion]:
        """What is suspected now: what ranks have said, and, while RUNNING, steps past their bound (ages in seconds)."""
        said = [
            Suspicion(rank=rank, reason=reason, age_s=now - at, told=True, unfit=rank in self._unfit)
            for rank, (reason, at, _) in sorted(self._said.items())
        ]
        if row.state is not State.RUNNING:
            return said
        bound_s = self._steps.bound_s
        hung = [
            Suspicion(
                rank=rank,
                reason=f"its step has run for {age_s:.1f} s, past the bound of {bound_s:.1f} s",
                age_s=age_s - bound_s,
                told=False,
            )
            for rank, age_s in self._steps.overdue(now)
            if rank in row.holders
        ]
        return said + hung
