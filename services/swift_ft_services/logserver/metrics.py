"""The log server's metrics: read from its state at scrape time, and counters outside of the hot path.

Commits are counted once for a group of records, syncs and refusals once each, the rest comes from events. All of it is
created only with --metrics-listen.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_ft import events
from swift_ft.metrics import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    LATENCY_S,
    STATES,
    Distribution,
    Family,
    Samples,
    Value,
    plain,
)
from swift_ft_services.logserver.administration import rest
from swift_ft_services.logserver.core import JobState
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.quotas import Alarm
from swift_ft_services.logserver.state import CONDITIONS, ServerState
from swift_ft_services.logserver.storage_interface import Write

_JOB = ("job",)
_REASON = ("reason",)
ALARMS = tuple(alarm.name.lower() for alarm in Alarm)


def _family(kind: str, name: str, help: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(f"swift_log_{name}", kind, help, labels)


_SERVER_VALUES: Mapping[Family, Callable[[ServerState], Value | None]] = {
    Family(
        "swift_log_state",
        STATES,
        "What it does: serving, full (read-only), failed, draining.",
        (),
        CONDITIONS,
    ): lambda state: state.condition(),
    _family(GAUGE, "sessions", "Writers that are connected."): lambda state: len(state.sessions),
    _family(GAUGE, "credit_used_bytes", "Bytes under way from writers."): (
        lambda state: sum(session.underway_bytes for session in state.sessions)
    ),
    _family(GAUGE, "credit_granted_bytes", "Bytes that the connected writers may have under way."): (
        lambda state: state.config.credit_bytes * len(state.sessions)
    ),
    _family(GAUGE, "used_bytes", "Bytes of records that are kept, of all jobs."): (
        lambda state: state.space.server.used_bytes
    ),
    _family(GAUGE, "quota_bytes", "--quota-bytes, if it is given."): (
        lambda state: state.space.server.quota_bytes or None
    ),
    _family(GAUGE, "limit_bytes", "The quota, or what the disk has room for if that is less."): (
        lambda state: state.space.server.limit_bytes or None
    ),
    _family(GAUGE, "high_mark_bytes", "Above this, the alarm begins: a part of the limit."): (
        lambda state: state.space.high_mark_bytes() or None
    ),
    Family("swift_log_alarm", STATES, "The server's alarm; full also if the disk is full.", (), ALARMS): (
        lambda state: state.space.server_alarm.name.lower()
    ),
}
"""Metric -> its value now; None: absent. Read while the server's lock is held."""

_JOB_VALUES: Mapping[Family, Callable[[ServerState, JobState], Value | None]] = {
    _family(GAUGE, "generation", "The granted generation.", _JOB): lambda state, job: job.generation,
    _family(GAUGE, "trimmed_below_step", "Steps below this are dropped.", _JOB): (
        lambda state, job: job.trimmed_below_step
    ),
    _family(GAUGE, "trim_waits", "1 while readers hold a trim up.", _JOB): (
        lambda state, job: job.trim_wanted > job.trimmed_below_step
    ),
    _family(GAUGE, "streams", "Streams that are known.", _JOB): lambda state, job: len(job.streams),
    _family(GAUGE, "corrupt_streams", "Streams that are quarantined or have a hole.", _JOB): (
        lambda state, job: sum(bool(stream.corrupt_reason) for stream in job.streams.values())
    ),
    _family(GAUGE, "held_records", "Records that can be read.", _JOB): lambda state, job: job.tally.records,
    _family(GAUGE, "held_bytes", "Bytes of these records, with their frames.", _JOB): (
        lambda state, job: job.tally.bytes
    ),
    _family(GAUGE, "readers", "Read calls under way.", _JOB): lambda state, job: len(job.readers),
    _family(GAUGE, "job_quota_bytes", "--job-quota-bytes, if it is given.", _JOB): (
        lambda state, job: state.space.job(job.name).quota_bytes or None
    ),
    Family("swift_log_job_alarm", STATES, "The alarm of the job's quota.", _JOB, ALARMS): (
        lambda state, job: state.space.job(job.name).alarm.name.lower()
    ),
}
"""Metric of a job -> its value now; None: absent. Read while the server's lock is held."""

_EVENTS: Mapping[str, Family] = {
    "quarantined": _family(
        COUNTER, "quarantines_total", "Streams quarantined: other bytes for a known record.", _JOB
    ),
    "stream_corrupt": _family(COUNTER, "damage_found_total", "Records found damaged or gone.", _JOB),
    "torn_tail": _family(COUNTER, "torn_tails_total", "Torn tails cut at the start.", _JOB),
}

_COUNTED = (
    *_EVENTS.values(),
    _family(COUNTER, "appended_records_total", "Records handed to the disk.", _JOB),
    _family(COUNTER, "appended_bytes_total", "Bytes of these records, with their frames.", _JOB),
    _family(COUNTER, "commit_failures_total", "Commits that the disk refused.", _REASON),
    _family(COUNTER, "refusals_total", "Calls that ended with a refusal.", _REASON),
)

FAMILIES = (
    *_SERVER_VALUES,
    *_JOB_VALUES,
    *_COUNTED,
    _family(HISTOGRAM, "commit_seconds", "A group commit: write and, if it is due, sync."),
    _family(HISTOGRAM, "sync_seconds", "One sync of a file."),
    _family(GAUGE, "queued_records", "Records accepted and not acknowledged yet."),
    _family(GAUGE, "disk_free_bytes", "Space left on its filesystem for this user."),
    _family(GAUGE, "disk_size_bytes", "Size of its filesystem."),
)


class LogMetrics:
    def __init__(self, directory: Path) -> None:
        self.commit_s = Distribution(LATENCY_S)
        self.sync_s = Distribution(LATENCY_S)
        self._directory = directory
        self._counts: dict[str, Counter[str]] = {family.name: Counter() for family in _COUNTED}
        self._lock = threading.Lock()
        self.close = events.listen(self._count_event)

    def refused(self, reason: str) -> None:
        self._count("refusals_total", reason)

    def committed(self, writes: Sequence[Write], seconds: float, error: str) -> None:
        """Counts a commit. ``error``: name of the error that the storage raised; empty if it raised none."""
        with self._lock:
            for write in writes:
                self._counts["swift_log_appended_records_total"][write.job] += 1
                self._counts["swift_log_appended_bytes_total"][write.job] += write.size
        if error:
            self._count("commit_failures_total", error)
        else:
            self.commit_s.observe(seconds)

    def _count(self, name: str, label: str) -> None:
        with self._lock:
            self._counts[f"swift_log_{name}"][label] += 1

    def _count_event(self, event: str, fields: Mapping[str, Any]) -> None:
        if event in _EVENTS:
            self._count(_EVENTS[event].name.removeprefix("swift_log_"), fields["job"])

    def samples(self, engine: LogEngine) -> Samples:
        state = engine.state
        out: dict[str, dict[tuple[str, ...], Value]] = {family.name: {} for family in FAMILIES}
        with state.changed:
            unsettled = engine.committer.commits.unsettled
            for family, of_server in _SERVER_VALUES.items():
                if (value := of_server(state)) is not None:
                    out[family.name] = {(): value}
            names = list(state.core.jobs)
        for name in names:  # one at a time: jobs may be large, and are written meanwhile
            with state.changed:
                if job := state.core.jobs.get(name):
                    for family, of_job in _JOB_VALUES.items():
                        if (value := of_job(state, job)) is not None:
                            out[family.name][name,] = value
            rest()
        with self._lock:
            for counter, counts in self._counts.items():
                out[counter] = {(label,): value for label, value in counts.items()}
        disk = os.statvfs(self._directory)
        rest_of_them: Mapping[str, Value] = {
            "commit_seconds": self.commit_s,
            "sync_seconds": self.sync_s,
            "queued_records": unsettled,
            "disk_free_bytes": disk.f_bavail * disk.f_frsize,
            "disk_size_bytes": disk.f_blocks * disk.f_frsize,
        }
        return {**out, **{f"swift_log_{name}": plain(value) for name, value in rest_of_them.items()}}
