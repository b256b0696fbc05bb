"""Leases, steps that run too long, and lost connections."""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from statistics import median
from typing import Generic, TypeVar

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator.job_record import JobRow, State
from swift_ft_services.coordinator.timeouts import Timing

# Leases: of ranks and, in the same way, of log servers.

Who = TypeVar("Who", bound=Hashable)


class Leases(Generic[Who]):
    """Times of the last renewals; `now` is in monotonic seconds. Not durable: after a restart all leases start anew.

    All leases have one length, so the entries are in the order of renewal, and only the first ones can have expired.
    """

    def __init__(self, who: Iterable[Who], now: float) -> None:
        self._heard = dict.fromkeys(who, now)
        """Holder -> time of its last renewal, oldest first."""
        self._own = dict(self._heard)
        """Holder -> time when it last renewed the lease itself."""
        self._stood_s = 0.0
        """Seconds for which the leases' clock was paused; all times here are readings of that clock."""

    def renew(self, who: Who, now: float) -> None:
        self._own[who] = now - self._stood_s
        self._renew(who, now)

    def keep(self, who: Who, now: float, at_most_s: float) -> None:
        """Renews on its behalf, if it renewed the lease itself within the last `at_most_s` seconds."""
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
        """Pauses the clock for the last `seconds`: messages received in that time may be unread."""
        self._stood_s += seconds
        at = now - self._stood_s
        for who in reversed(self._heard):
            if self._heard[who] <= at:
                break
            self._heard[who] = at  # renewed in that time: counts as renewed now

    def overdue(self, limit_s: float, now: float) -> dict[Who, str]:
        """Returns each holder with an expired lease -> the reason, as text."""
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
STEP_BOUND_FACTOR = 10
"""A step counts as hung once it has run this many times as long as the longest of the recent steps."""


class StepClock:
    """Durations of steps, learned from heartbeats; finds ranks whose step has run past the bound.

    The resolution is the heartbeat interval: several steps between two heartbeats count as equally long.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._at: dict[int, tuple[int, float]] = {}
        """rank -> (version, time since which it is at this version)"""

    def restart(self, versions: Mapping[int, int], now: float) -> None:
        """Restarts the clock when training continues, with each rank at its version. Earlier heartbeats, and states
        restored by replacements, then do not count as progress."""
        self._at = {rank: (version, now) for rank, version in versions.items()}

    def forget(self, rank: int) -> None:
        self._at.pop(rank, None)

    def see(self, rank: int, version: int, now: float, *, running: bool) -> None:
        known = self._at.get(rank)
        if known is not None and (version == known[0] or (running and version < known[0])):
            return  # a lower version was sent before training continued
        if known is not None and running:
            self._recent_s.append((now - known[1]) / (version - known[0]))
        self._at[rank] = (version, now)

    def version(self, rank: int) -> int:
        return self._at.get(rank, (0, 0.0))[0]

    def steps_within(self, seconds: float) -> int:
        """Returns how many steps a rank begins within `seconds`, from the median of the recent steps.

        Not from the shortest one: a heartbeat that is late makes the step after it look short.
        """
        typical_s = median(self._recent_s) if self._recent_s else seconds + 1.0
        return int(seconds / max(typical_s, 1e-4))

    @property
    def bound_s(self) -> float:
        longest_s = max(self._recent_s, default=0.0)
        return max(self._timing.step_bound_s, STEP_BOUND_FACTOR * longest_s)

    def overdue(self, now: float) -> list[tuple[int, float]]:
        """Returns (rank, seconds) of each step past the bound. Empty until the end of a first step was observed."""
        if not self._recent_s:
            return []
        return [
            (rank, now - since) for rank, (_, since) in sorted(self._at.items()) if now - since > self.bound_s
        ]


class Suspicions:
    """Suspicions, which never fence a rank: problems that ranks report, and steps that run too long."""

    def __init__(self, steps: StepClock) -> None:
        self._steps = steps
        self._said: dict[int, tuple[str, float, int, bool]] = {}
        """rank -> (reason, when, generation, whether its place has failed the health check)"""

    def say(self, rank: int, reason: str, now: float, generation: int, *, unfit: bool = False) -> bool:
        """Records a reported problem; an empty reason takes it back. Returns whether it is recorded: not if
        the rank has lost a connection in this generation, on which a new generation depends."""
        known = self._said.get(rank)
        if known is not None and known[2] and (known[2] == generation or not (generation or unfit)):
            return False
        if not reason and not generation:
            self._said.pop(rank, None)
            return False
        self._said[rank] = (reason, now, generation, unfit)
        return True

    def clear(self) -> None:
        self._said.clear()

    def due(self, row: JobRow, older_s: float, now: float) -> str:
        """Returns why a generation must begin: a connection lost for `older_s`, and no death reported; else empty."""
        if row.state not in (State.FORMING, State.RECOVERING, State.RUNNING):
            return ""
        for rank, (reason, at, generation, _) in sorted(self._said.items()):
            if generation == row.generation and now - at >= older_s:
                return f"rank {rank} has lost a connection, and nobody has died: {reason}"
        return ""

    def all(self, row: JobRow, now: float) -> list[pb.Suspicion]:
        """Returns the current suspicions: reported problems and, while RUNNING, steps past their bound (in s)."""
        said = [
            pb.Suspicion(rank=rank, reason=reason, age_s=now - at, told=True, unfit=unfit)
            for rank, (reason, at, _, unfit) in sorted(self._said.items())
        ]
        if row.state is not State.RUNNING:
            return said
        bound_s = self._steps.bound_s
        hung = [
            pb.Suspicion(
                rank=rank,
                reason=f"its step has run for {age_s:.1f} s, past the bound of {bound_s:.1f} s",
                age_s=age_s - bound_s,
                told=False,
            )
            for rank, age_s in self._steps.overdue(now)
            if rank in row.holders
        ]
        return said + hung
