"""The coordinator's metrics: read from the jobs at scrape time, and counts from transitions and events.

A recovery is timed from the transition to FENCING that began it to the transition to RUNNING that ended it; recoveries
that superseded each other in between count as one. All counts start with the process. This module is loaded only with
--metrics-listen.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import optional
from swift_ft.metrics import (
    COUNTER,
    DURATION_S,
    GAUGE,
    HISTOGRAM,
    STATES,
    Distribution,
    Family,
    Samples,
    Value,
)
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import JobRow, State
from swift_ft_services.coordinator.log_placement import unreplaced

_JOB = ("job",)
_RANK = ("job", "rank")


def _oldest_lease_s(job: Job, now: float) -> float:
    holders = {} if job.row.state.is_over else job.row.holders
    return max((job.leases.age_s(rank, now) for rank, one in holders.items() if not one.gone), default=0.0)


def _replay_left_steps(job: Job, now: float) -> int:
    return max((max(0, replay.target - replay.version) for replay in job.replays.values()), default=0)


def _replay_left_s(job: Job, now: float) -> float | None:
    left = [optional(replay, "seconds_left") for replay in job.replays.values()]
    return max((one for one in left if one is not None), default=None if left else 0.0)


def _gauge(name: str, help: str, labels: tuple[str, ...] = _JOB) -> Family:
    return Family(f"swift_coordinator_{name}", GAUGE, help, labels)


def _counter(name: str, help: str, labels: tuple[str, ...] = _JOB) -> Family:
    return Family(f"swift_coordinator_{name}_total", COUNTER, help, labels)


_JOB_VALUES: Mapping[Family, Callable[[Job, float], Value | None]] = {
    Family(
        "swift_coordinator_job_state",
        STATES,
        "1 for the job's state, 0 for the others.",
        _JOB,
        tuple(str(state) for state in State),
    ): lambda job, now: str(job.row.state),
    _gauge("generation", "The job's generation."): lambda job, now: job.row.generation,
    _gauge("world_size", "Ranks that the job has."): lambda job, now: job.row.world_size,
    _gauge("live_ranks", "Ranks that a process holds."): lambda job, now: len(job.row.holders),
    _gauge("oldest_lease_seconds", "Time since the last sign of the rank that has been silent longest."): (
        _oldest_lease_s
    ),
    _gauge("suspicions", "Suspicions and steps past their bound, now."): (
        lambda job, now: len(job.suspicions.all(job.row, now))
    ),
    _gauge("blocked_log_servers", "Log servers that a recovery waits for."): (
        lambda job, now: len(job.row.blocked)
    ),
    _gauge("lost_log_servers", "Log servers fewer than at the start of the job."): (
        lambda job, now: 0 if job.row.state.is_over else unreplaced(job.row)
    ),
    _gauge("version", "Optimizer steps done, by the rank that is furthest."): lambda job, now: (
        job.checkpoints.newest_known()
    ),
    _gauge("replay_left_steps", "Steps that the replay under way still has to do."): _replay_left_steps,
    _gauge("replay_left_seconds", "How long the replay will still take; absent while that is unknown."): (
        _replay_left_s
    ),
    _gauge("checkpoint_version", "The newest complete checkpoint."): (
        lambda job, now: max(job.row.checkpoints, default=None)
    ),
    _gauge("unsaved_ranks", "Ranks that cannot write their newest checkpoint; the one before it stands."): (
        lambda job, now: 0 if job.row.state.is_over else len(job.checkpoints.unsaved)
    ),
    _gauge(
        "exact",
        "1 while nothing is known that makes the job's bits others than those of a run without failures.",
    ): lambda job, now: job.row.inexact_since is None,
}
"""Metric of a job -> its value now; None: absent."""

_RANK_VALUES: Mapping[Family, Callable[[pb.Rehearsal], Value]] = {
    _gauge(
        "rehearsed_version",
        "The checkpoint that the rank's newest rehearsal began with; absent without one.",
        _RANK,
    ): lambda known: known.version,
    _gauge("rehearsed_steps", "Steps that this rehearsal has done again.", _RANK): lambda known: known.steps,
    _gauge(
        "rehearsal_differs", "1 if this rehearsal did not give what the rank had; 0 if it was equal.", _RANK
    ): lambda known: bool(known.difference),
}
"""Metric of a rank that has completed a rehearsal -> its value."""

_EVENTS: Mapping[str, Family] = {
    "lease_expired": _counter("lease_expiries", "Ranks given up for their silence."),
    "fenced": _counter("fenced_ranks", "Processes that were fenced."),
    "refused": _counter("replay_refusals", "Recoveries that a rank refused."),
    "checkpoint_asked": _counter(
        "early_checkpoints", "Checkpoints asked for before the interval brings one."
    ),
}

FAMILIES = (
    *_JOB_VALUES,
    *_RANK_VALUES,
    *_EVENTS.values(),
    _gauge(
        "checkpoint_age_seconds",
        "Time since it became complete, or since this process began, whichever is shorter.",
    ),
    _counter("recoveries", "Recoveries that ended.", ("job", "strategy")),
    Family("swift_coordinator_recovery_seconds", HISTOGRAM, "From a loss to RUNNING.", _JOB),
    _counter("refusals", "Calls that were refused.", ("reason",)),
)


class CoordinatorMetrics:
    """The coordinator's side of `swift_ft.metrics.Exposition`. Used on the driver's loop, but for `refused`."""

    def __init__(self, clock: Callable[[], float] = events.now) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._lost_at: dict[str, float] = {}
        self._newest: dict[str, tuple[int | None, float]] = {}
        """Job -> (newest complete checkpoint, time since which it is the newest)."""
        self._recoveries: Counter[tuple[str, str]] = Counter()
        self._recovery_s: dict[str, Distribution] = {}
        self._counts: dict[str, Counter[str]] = {family.name: Counter() for family in _EVENTS.values()}
        self._refusals: Counter[str] = Counter()
        self.close = events.listen(self._count_event)

    def after_durable(self, row: JobRow, persist: m.Persist) -> None:
        newest = row.checkpoints[-1] if row.checkpoints else None
        known = self._newest.get(row.job)
        if known is None:  # first row of this job here: the time of completion is unknown
            self._newest[row.job] = (newest, self._began)
        elif known[0] != newest:
            self._newest[row.job] = (newest, self._clock())
        if persist.entered is State.FENCING:
            self._lost_at.setdefault(row.job, self._clock())
        elif persist.entered is State.RUNNING and row.plan is not None:
            self._recoveries[row.job, str(row.plan.costliest)] += 1
            lost_at = self._lost_at.pop(row.job, None)
            if lost_at is not None:  # otherwise this process started during the recovery
                times = self._recovery_s.setdefault(row.job, Distribution(DURATION_S))
                times.observe(self._clock() - lost_at)
        elif persist.entered in (State.FAILED, State.STOPPED):
            self._lost_at.pop(row.job, None)

    def forget_recoveries(self) -> None:
        """(the store is lost) Another coordinator may end them."""
        self._lost_at.clear()

    def refused(self, reason: str) -> None:
        """(any thread) Counts a refused call."""
        with self._lock:
            self._refusals[reason] += 1

    def _count_event(self, event: str, fields: Mapping[str, Any]) -> None:
        if event in _EVENTS:
            with self._lock:
                self._counts[_EVENTS[event].name][fields["job"]] += 1

    def samples(self, jobs: Collection[Job]) -> Samples:
        now = self._clock()
        out: dict[str, dict[tuple[str, ...], Value]] = {}
        for family, of_job in _JOB_VALUES.items():
            values = {(job.row.job,): of_job(job, now) for job in jobs}
            out[family.name] = {key: value for key, value in values.items() if value is not None}
        rehearsed = {
            (job.row.job, str(rank)): known
            for job in jobs
            for rank, known in job.row.rehearsals.items()
            if known.done
        }
        for family, of_rank in _RANK_VALUES.items():
            out[family.name] = {key: of_rank(known) for key, known in rehearsed.items()}
        out["swift_coordinator_checkpoint_age_seconds"] = {
            (job.row.job,): now - self._newest.get(job.row.job, (None, self._began))[1]
            for job in jobs
            if job.row.checkpoints
        }
        out["swift_coordinator_recoveries_total"] = {
            (job, strategy): count for (job, strategy), count in self._recoveries.items()
        }
        out["swift_coordinator_recovery_seconds"] = {(job,): known for job, known in self._recovery_s.items()}
        with self._lock:
            counted = {**self._counts, "swift_coordinator_refusals_total": self._refusals}
            for name, by_label in counted.items():
                out[name] = {(label,): count for label, count in by_label.items()}
        return out
