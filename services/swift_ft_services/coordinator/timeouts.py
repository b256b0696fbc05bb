"""Every timeout of the coordinator, derived from two numbers and checked as a hierarchy."""

from dataclasses import dataclass

from swift_ft.log.placement import PATIENCE_S

HEARTBEAT_S = 0.5
LEASE_HEARTBEATS = 20
LOG_LOST_S = 30.0
REPLACED_WITHIN_S = 120.0
KEPT_LEASES = 60
BEATS_PER_S = 512
"""Of one job, unless its leases are too short for that."""
BEATS_A_LEASE = 5
LEASE_S_MAX = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """heartbeat_s < lease_s < step_bound_s, and calls to log servers < log_lost_s < PATIENCE_S, with room between."""

    heartbeat_s: float = HEARTBEAT_S
    """How often a rank renews its lease."""
    lease_s: float = LEASE_HEARTBEATS * HEARTBEAT_S
    """A rank that was not heard for so long is dead. A launcher tells of an exit at once, so this is for hangs and
    lost machines; an import or a trace may keep a healthy rank's other threads quiet for seconds."""
    step_bound_s: float = 30.0
    """No step is called hung before it has run for so long, however short the steps before it were."""
    step_bound_factor: float = 10.0
    """A step is called hung once it has run for so many times the longest of the last steps."""

    replaced_within_s: float = REPLACED_WITHIN_S
    """If no process has joined for a lost rank for so long, none will: its launcher may be lost with it. So long is
    waited at most (`swift_ft.planner.assignment`)."""
    log_lost_s: float = LOG_LOST_S
    """A log server that has not answered for so long is lost, if another one is left; 0: never. Long enough for one
    that is started again, and shorter than ranks wait for it."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.heartbeat_s <= 60:
            raise ValueError(f"heartbeat of {self.heartbeat_s:g} s: choose 0.01 to 60 s")
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"lease of {self.lease_s:g} s is too short for a heartbeat every {self.heartbeat_s:g} s: "
                "a lease lasts at least 3 heartbeats"
            )
        if self.lease_s > LEASE_S_MAX:
            raise ValueError(
                f"lease of {self.lease_s:g} s: a rank that is lost would not be missed; choose at most "
                f"{LEASE_S_MAX:g} s"
            )
        if self.step_bound_s < 2 * self.lease_s:
            raise ValueError(
                f"step bound of {self.step_bound_s:g} s is too short for a lease of {self.lease_s:g} s: "
                "a step is called hung after at least 2 leases"
            )
        if self.log_lost_s and not 2 * self.log_call_s <= self.log_lost_s <= PATIENCE_S:
            raise ValueError(
                f"a log server is lost after {self.log_lost_s:g} s: choose {2 * self.log_call_s:g} to "
                f"{PATIENCE_S:g} s (two calls to it at least, and no longer than ranks wait for it), or 0: never"
            )
        if self.step_bound_factor < 2:
            raise ValueError(f"step bound factor {self.step_bound_factor:g}: choose at least 2")

    def interval_s(self, members: int) -> float:
        """How often each of so many ranks is asked to renew its lease: more seldom in a large job, so that heartbeats
        leave room for what matters, and often enough for a lease to outlast some that are late."""
        return max(self.heartbeat_s, min(members / BEATS_PER_S, self.lease_s / BEATS_A_LEASE))

    @property
    def kept_s(self) -> float:
        """How long a rank that says nothing is believed to live because the process beside it says so: something in
        it holds the GIL. Long enough for a compiler; whoever is stuck there for good is fenced in the end."""
        return KEPT_LEASES * self.lease_s

    @property
    def log_call_s(self) -> float:
        """One attempt of a call to a log server, which may have to sync its disk. Then it is tried again."""
        return _log_call_s(self.heartbeat_s)

    @property
    def suspicion_s(self) -> float:
        """How long after a broken connection somebody may still be found dead. A launcher tells of an exit within
        milliseconds; if it does not, all go on together from what they hold."""
        return self.heartbeat_s

    @property
    def space_s(self) -> float:
        """How often the log servers are asked how much room there is."""
        return max(1.0, 2 * self.heartbeat_s)

    @property
    def tick_s(self) -> float:
        """How often leases are looked at."""
        return self.heartbeat_s / 2

    @property
    def stall_s(self) -> float:
        """The coordinator itself was not running if it has not looked for so long: leases start afresh."""
        return self.lease_s / 2


def _log_call_s(heartbeat_s: float) -> float:
    return max(1.0, 6 * heartbeat_s)


def usual_log_lost_s(heartbeat_s: float) -> float:
    """What --log-lost-s is unless it is said; 0 if calls take too long for anything else."""
    least_s = max(LOG_LOST_S, 2 * _log_call_s(heartbeat_s))
    return least_s if least_s <= PATIENCE_S else 0.0
