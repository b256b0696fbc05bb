"""Every timeout of the coordinator, derived from two numbers and checked as a hierarchy."""

from dataclasses import dataclass

from swift_ft.log.placement import PATIENCE_S

HEARTBEAT_S = 1.0
DETECT_HEARTBEAT_S = {"usual": HEARTBEAT_S, "fast": 0.2}
"""--detect → seconds between two heartbeats, from which all other times follow."""
LEASE_HEARTBEATS = 10
LOG_LOST_S = 30.0
REPLACED_WITHIN_S = 120.0
KEPT_LEASES = 60
BEATS_PER_S = 512
"""Heartbeats per second that one job may send, unless its leases are too short for that."""
BEATS_A_LEASE = 5
LEASE_S_MAX = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """heartbeat_s < lease_s < step_bound_s, and calls to log servers < log_lost_s < PATIENCE_S, with room between."""

    heartbeat_s: float = HEARTBEAT_S
    """Seconds between two heartbeats of a rank, each of which renews its lease."""
    lease_s: float = LEASE_HEARTBEATS * HEARTBEAT_S
    """Silence after which a rank is dead. A launcher reports an exit at once, so this is for hangs and lost machines.
    An import or a trace may block a healthy rank's other threads for seconds."""
    step_bound_s: float = 30.0
    """Shortest duration after which a step counts as hung, however short the steps before it were."""

    suspicion_s: float = HEARTBEAT_S / 2
    """Seconds after a lost connection in which a death may still be reported. A launcher reports an exit within
    milliseconds; without a report, all ranks start a new generation with the state that they hold."""
    replaced_within_s: float = REPLACED_WITHIN_S
    """Longest wait for a process that replaces a lost rank (`swift_ft.planner.replay_cost`). After it none is expected:
    the launcher may be lost too."""
    log_lost_s: float = LOG_LOST_S
    """Silence after which a log server is lost, if another one is left; 0: never. Long enough for a restart of the
    server, and shorter than ranks wait for it."""

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

    def interval_s(self, members: int) -> float:
        """Returns the seconds between heartbeats of one of `members` ranks. Longer in a large job, to bound the load;
        short enough for a lease to survive a few late heartbeats."""
        return max(self.heartbeat_s, min(members / BEATS_PER_S, self.lease_s / BEATS_A_LEASE))

    @property
    def kept_s(self) -> float:
        """Longest time that another process may renew the lease of a silent rank, for instance one whose GIL is held.
        Long enough for a compiler; a rank that never returns is fenced in the end."""
        return KEPT_LEASES * self.lease_s

    @property
    def log_call_s(self) -> float:
        """Timeout of one call to a log server, which may have to sync its disk. Then the call is retried."""
        return _log_call_s(2 * self.suspicion_s)

    @property
    def space_s(self) -> float:
        return max(1.0, self.heartbeat_s)

    @property
    def tick_s(self) -> float:
        return self.heartbeat_s / 4

    @property
    def stall_s(self) -> float:
        """Gap between two checks after which the coordinator itself counts as stalled: all leases restart."""
        return self.lease_s / 2


def _log_call_s(heartbeat_s: float) -> float:
    return max(1.0, 3 * heartbeat_s)


def usual_log_lost_s(heartbeat_s: float) -> float:
    """Returns the default of --log-lost-s; 0 if calls may take longer than any valid value allows."""
    least_s = max(LOG_LOST_S, 2 * _log_call_s(heartbeat_s))
    return least_s if least_s <= PATIENCE_S else 0.0
