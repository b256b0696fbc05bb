"""Leases, steps that run too long, and connections that broke."""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from swift_ft_services.coordinator.job_record import JobRow, State
from swift_ft_services.coordinator.timeouts import Timing

# Leases: who has not been heard for too long. Ranks, and in the same way log servers.

Who = TypeVar("Who", bound=Hashable)


class Leases(Generic[Who]):
    """When each was heard last; `now` is monotonic seconds. Not durable: after a restart all begin anew.

    All leases are of one length, so whoever was heard last comes last, and only the first ones can have run out.
    """

    def __init__(self, who: Iterable[Who], now: float) -> None:
        self._heard = dict.fromkeys(who, now)
        """In the order of time."""
        self._own = dict(self._heard)
        """When each spoke itself."""
        self._stood_s = 0.0
        """How long the leases' clock has stood still: what is in here is by that clock."""

    def renew(self, who: Who, now: float) -> None:
        self._own[who] = now - self._stood_s
        self._renew(who, now)

    def keep(self, who: Who, now: float, at_most_s: float) -> None:
        """Somebody says that it lives. That counts for so long after it spoke itself."""
        at = now - self._stood_s
        if at - self._own.setdefault(who, at) <= at_most_s:
            self._renew(who, now)

    def _renew(self, who: Who, now: float) -> None:
        self._heard.pop(who, None)
        self._heard[who] = now - self._stood_s

    def forget(self, who: Who) -> None:
        self._heard.pop(who, None)
        self._own.pop(who, None)

    def start_afresh(self, now: float) -> None:
        self._heard = dict.fromkeys(self._heard, now - self._stood_s)
        self._own = dict(self._heard)

    def stand_still(self, seconds: float, now: float) -> None:
        """The last `seconds` count for no lease: what came in them may not have been read."""
        self._stood_s += seconds
        at = now - self._stood_s
        for who in reversed(self._heard):
            if self._heard[who] <= at:
                break
            self._heard[who] = at  # it was heard in that time: as if now

    def overdue(self, limit_s: float, now: float) -> dict[Who, str]:
        """Those whose lease has run out -> in words."""
        found = {}
        for who, heard in self._heard.items():
            age_s = now - self._stood_s - heard
            if age_s <= limit_s:
                break
            found[who] = f"was silent for {age_s:.1f} s"
        return found

    def age_s(self, who: Who, now: float) -> float:
        at = now - self._stood_s
        return at - self._heard.setdefault(who, at)


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
