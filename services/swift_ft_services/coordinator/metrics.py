"""The coordinator's metrics: a snapshot of the jobs at scrape time, and counts from transitions and events.

A recovery is timed from the transition to FENCING that began it to the transition to RUNNING that ended it; recoveries
that superseded each other in between count as one. All counts start with the process. This module is loaded only with
--metrics-listen.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift_ft import events
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
from swift_ft_services.coordinator.job_record import JobRow, State
from swift_ft_services.coordinator.views import JobSnapshot

_JOB = ("job",)
_RANK = ("job", "rank")

FAMILIES = (
    Family(
        "swift_coordinator_job_state",
        STATES,
        "1 for the job's state, 0 for the others.",
        _JOB,
        tuple(str(state) for state in State),
    ),
    Family("swift_coordinator_generation", GAUGE, "The job's generation.", _JOB),
    Family("swift_coordinator_world_size", GAUGE, "Ranks that the job has.", _JOB),
    Family("swift_coordinator_live_ranks", GAUGE, "Ranks that a process holds.", _JOB),
    Family(
        "swift_coordinator_oldest_lease_seconds",
        GAUGE,
        "Time since the last sign of the rank that has been silent longest.",
        _JOB,
    ),
    Family("swift_coordinator_suspicions", GAUGE, "Suspicions and steps past their bound, now.", _JOB),
    Family("swift_coordinator_blocked_log_servers", GAUGE, "Log servers that a recovery waits for.", _JOB),
    Family("swift_coordinator_lost_log_servers", GAUGE, "Log servers given up and not replaced.", _JOB),
    Family("swift_coordinator_version", GAUGE, "Optimizer steps done, by the rank that is furthest.", _JOB),
    Family(
        "swift_coordinator_measured_ranks", GAUGE, "Ranks that have reported how long their steps take.", _JOB
    ),
    Family(
        "swift_coordinator_replay_left_steps",
        GAUGE,
        "Steps that the replay under way still has to do.",
        _JOB,
    ),
    Family(
        "swift_coordinator_replay_left_seconds",
        GAUGE,
        "How long the replay will still take; absent while that is unknown.",
        _JOB,
    ),
    Family(
        "swift_coordinator_recovery_groups",
        GAUGE,
        "Recovery groups; 0: every rank is a group by itself.",
        _JOB,
    ),
    Family("swift_coordinator_checkpoint_version", GAUGE, "The newest complete checkpoint.", _JOB),
    Family(
        "swift_coordinator_checkpoint_age_seconds",
        GAUGE,
        "Time since it became complete, or since this process began, whichever is shorter.",
        _JOB,
    ),
    Family(
        "swift_coordinator_unsaved_ranks",
        GAUGE,
        "Ranks that cannot write their newest checkpoint; the one before it stands.",
        _JOB,
    ),
    Family(
        "swift_coordinator_exact",
        GAUGE,
        "1 while nothing is known that makes the job's bits others than those of a run without failures.",
        _JOB,
    ),
    Family(
        "swift_coordinator_rehearsed_version",
        GAUGE,
        "The checkpoint that the rank's newest rehearsal began with; absent without one.",
        _RANK,
    ),
    Family("swift_coordinator_rehearsed_steps", GAUGE, "Steps that this rehearsal has done again.", _RANK),
    Family(
        "swift_coordinator_rehearsal_differs",
        GAUGE,
        "1 if this rehearsal did not give what the rank had; 0 if it was equal.",
        _RANK,
    ),
    Family("swift_coordinator_recoveries_total", COUNTER, "Recoveries that ended.", ("job", "strategy")),
    Family("swift_coordinator_recovery_seconds", HISTOGRAM, "From a loss to RUNNING.", _JOB),
    Family("swift_coordinator_lease_expiries_total", COUNTER, "Ranks given up for their silence.", _JOB),
    Family("swift_coordinator_fenced_ranks_total", COUNTER, "Processes that were fenced.", _JOB),
    Family("swift_coordinator_replay_refusals_total", COUNTER, "Recoveries that a rank refused.", _JOB),
    Family(
        "swift_coordinator_early_checkpoints_total",
        COUNTER,
        "Checkpoints asked for before the interval brings one.",
        _JOB,
    ),
    Family("swift_coordinator_refusals_total", COUNTER, "Calls that were refused.", ("reason",)),
)

_EVENTS = {
    "lease_expired": "swift_coordinator_lease_expiries_total",
    "fenced": "swift_coordinator_fenced_ranks_total",
    "refused": "swift_coordinator_replay_refusals_total",
    "checkpoint_asked": "swift_coordinator_early_checkpoints_total",
}


class CoordinatorMetrics:
    """The coordinator's side of `swift_ft.metrics.Exposition`. Updated on the driver's thread, read on another one."""

    def __init__(self, clock: Callable[[], float] = events.now) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._lost_at: dict[str, float] = {}
        self._newest: dict[str, tuple[int | None, float]] = {}
        """Job -> (newest complete checkpoint, time since which it is the newest)."""
        self._recoveries: Counter[tuple[str, str]] = Counter()
        self._recovery_s: dict[str, Distribution] = {}
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _EVENTS.values()}
        self._refusals: Counter[str] = Counter()
        self.close = events.listen(self._heard)

    def after_durable(self, row: JobRow, persist: m.Persist) -> None:
        """(driver) Updates the metrics from a row that has become durable."""
        with self._lock:
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

    def refused(self, reason: str) -> None:
        """(servicer) Counts a refused call."""
        with self._lock:
            self._refusals[reason] += 1

    def _heard(self, event: str, fields: Mapping[str, Any]) -> None:
        if event in _EVENTS:
            with self._lock:
                self._counts[_EVENTS[event]][fields["job"]] += 1

    def samples(self, jobs: Sequence[JobSnapshot]) -> Samples:
        """Returns the current value of every metric, by name and labels."""
        now = self._clock()
        out: dict[str, Mapping[tuple[str, ...], Value]] = {
            name: {(job.job,): getattr(job, field) for job in jobs} for name, field in _JOB_FIELDS.items()
        }
        out["swift_coordinator_replay_left_seconds"] = {
            (job.job,): job.replay_seconds_left for job in jobs if job.replay_seconds_left is not None
        }
        rehearsed = {(job.job, str(rank)): known for job in jobs for rank, known in job.rehearsals.items()}
        out["swift_coordinator_rehearsed_version"] = {key: known.version for key, known in rehearsed.items()}
        out["swift_coordinator_rehearsed_steps"] = {key: known.steps for key, known in rehearsed.items()}
        out["swift_coordinator_rehearsal_differs"] = {
            key: bool(known.difference) for key, known in rehearsed.items()
        }
        saved = [(job.job, job.checkpoint) for job in jobs if job.checkpoint is not None]
        out["swift_coordinator_checkpoint_version"] = {(job,): version for job, version in saved}
        with self._lock:
            out["swift_coordinator_checkpoint_age_seconds"] = {
                (job,): now - self._newest.get(job, (None, self._began))[1] for job, _ in saved
            }
            out["swift_coordinator_recoveries_total"] = {
                (job, strategy): count for (job, strategy), count in self._recoveries.items()
            }
            out["swift_coordinator_recovery_seconds"] = {
                (job,): known for job, known in self._recovery_s.items()
            }
            out["swift_coordinator_refusals_total"] = {(r,): count for r, count in self._refusals.items()}
            for name, counts in self._counts.items():
                out[name] = {(job,): count for job, count in counts.items()}
        return out


_JOB_FIELDS = {
    "swift_coordinator_job_state": "state",
    "swift_coordinator_generation": "generation",
    "swift_coordinator_world_size": "world_size",
    "swift_coordinator_live_ranks": "live_ranks",
    "swift_coordinator_oldest_lease_seconds": "oldest_lease_s",
    "swift_coordinator_suspicions": "suspicions",
    "swift_coordinator_blocked_log_servers": "blocked_log_servers",
    "swift_coordinator_lost_log_servers": "lost_log_servers",
    "swift_coordinator_version": "newest_version",
    "swift_coordinator_measured_ranks": "measured_ranks",
    "swift_coordinator_replay_left_steps": "replay_steps_left",
    "swift_coordinator_recovery_groups": "groups",
    "swift_coordinator_unsaved_ranks": "unsaved_ranks",
    "swift_coordinator_exact": "exact",
}
