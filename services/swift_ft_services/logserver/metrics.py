"""The log server's metrics: a snapshot at scrape time, and counters outside of the hot path.

The storage is wrapped (one count per commit, which is a group of records), refusals are counted by an interceptor
(once per call), the rest comes from events. All of it is created only with --metrics-listen.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import grpc

from swift_ft import events
from swift_ft.log.protocol import REASON_KEY
from swift_ft.log.segment import SUFFIX
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
from swift_ft_services.logserver.administration import ASKED_FOR
from swift_ft_services.logserver.disk import Disk, File
from swift_ft_services.logserver.quotas import Alarm
from swift_ft_services.logserver.server_stats import EngineSnapshot, JobSnapshot
from swift_ft_services.logserver.state import CONDITIONS
from swift_ft_services.logserver.storage_interface import Storage, Write

_JOB = ("job",)
ALARMS = tuple(alarm.name.lower() for alarm in Alarm)
_USAGE_MAX_AGE_S = 10.0

FAMILIES = (
    Family(
        "swift_log_state",
        STATES,
        "What it does: serving, full (read-only), failed, draining.",
        (),
        CONDITIONS,
    ),
    Family("swift_log_appended_records_total", COUNTER, "Records handed to the disk.", _JOB),
    Family("swift_log_appended_bytes_total", COUNTER, "Bytes of these records, with their frames.", _JOB),
    Family("swift_log_acknowledged_records_total", COUNTER, "Records acknowledged to their writers.", _JOB),
    Family("swift_log_commit_seconds", HISTOGRAM, "A group commit: write and, if it is due, sync."),
    Family("swift_log_sync_seconds", HISTOGRAM, "One sync of a file."),
    Family("swift_log_commit_failures_total", COUNTER, "Commits that the disk refused.", ("reason",)),
    Family("swift_log_queued_records", GAUGE, "Records accepted and not acknowledged yet."),
    Family("swift_log_unsynced_records", GAUGE, "Records accepted and not covered by a sync yet."),
    Family("swift_log_sessions", GAUGE, "Writers that are connected."),
    Family("swift_log_credit_used_bytes", GAUGE, "Bytes under way from writers."),
    Family("swift_log_credit_granted_bytes", GAUGE, "Bytes that the connected writers may have under way."),
    Family("swift_log_refusals_total", COUNTER, "Calls that ended with a refusal.", ("reason",)),
    Family(
        "swift_log_quarantines_total", COUNTER, "Streams quarantined: other bytes for a known record.", _JOB
    ),
    Family("swift_log_damage_found_total", COUNTER, "Records found damaged or gone.", _JOB),
    Family("swift_log_torn_tails_total", COUNTER, "Torn tails cut at the start.", _JOB),
    Family("swift_log_trims_total", COUNTER, "Trims that dropped something.", _JOB),
    Family("swift_log_freed_bytes_total", COUNTER, "Bytes of segments that were removed.", _JOB),
    Family("swift_log_fences_total", COUNTER, "Generations granted.", _JOB),
    Family("swift_log_resets_total", COUNTER, "Resets: a job's records given up for its checkpoint.", _JOB),
    Family("swift_log_generation", GAUGE, "The granted generation.", _JOB),
    Family("swift_log_trimmed_below_step", GAUGE, "Steps below this are dropped.", _JOB),
    Family("swift_log_trim_waits", GAUGE, "1 while readers hold a trim up.", _JOB),
    Family("swift_log_streams", GAUGE, "Streams that are known.", _JOB),
    Family("swift_log_corrupt_streams", GAUGE, "Streams that are quarantined or have a hole.", _JOB),
    Family("swift_log_held_records", GAUGE, "Records that can be read.", _JOB),
    Family("swift_log_held_bytes", GAUGE, "Bytes of these records, with their frames.", _JOB),
    Family("swift_log_readers", GAUGE, "Read calls under way.", _JOB),
    Family("swift_log_used_bytes", GAUGE, "Bytes of records that are kept, of all jobs."),
    Family("swift_log_quota_bytes", GAUGE, "--quota-bytes, if it is given."),
    Family("swift_log_limit_bytes", GAUGE, "The quota, or what the disk has room for if that is less."),
    Family("swift_log_high_mark_bytes", GAUGE, "Above this, the alarm begins: a part of the limit."),
    Family("swift_log_low_mark_bytes", GAUGE, "Below this, the alarm ends."),
    Family("swift_log_alarm", STATES, "The server's alarm; full also if the disk is full.", (), ALARMS),
    Family("swift_log_job_quota_bytes", GAUGE, "--job-quota-bytes, if it is given.", _JOB),
    Family(
        "swift_log_job_high_mark_bytes",
        GAUGE,
        "Above this, the job's alarm begins: a part of its quota.",
        _JOB,
    ),
    Family("swift_log_job_low_mark_bytes", GAUGE, "Below this, the alarm ends.", _JOB),
    Family("swift_log_job_alarm", STATES, "The alarm of the job's quota.", _JOB, ALARMS),
    Family("swift_log_checkpoint_wanted", GAUGE, "1 while an early checkpoint is asked for.", _JOB),
    Family("swift_log_trimmed_bytes_total", COUNTER, "Bytes of records given up by trims and resets.", _JOB),
    Family("swift_log_dropped_jobs_total", COUNTER, "Jobs dropped, on request or by age.", ("reason",)),
    Family("swift_log_dropped_bytes_total", COUNTER, "Bytes of the records of these jobs.", ("reason",)),
    Family("swift_log_segments", GAUGE, "Segment files in the directory."),
    Family("swift_log_disk_used_bytes", GAUGE, "Disk space that the directory's files take."),
    Family("swift_log_disk_free_bytes", GAUGE, "Space left on its filesystem for this user."),
    Family("swift_log_disk_size_bytes", GAUGE, "Size of its filesystem."),
)

_EVENTS = {
    "quarantined": "swift_log_quarantines_total",
    "stream_corrupt": "swift_log_damage_found_total",
    "torn_tail": "swift_log_torn_tails_total",
    "trimmed": "swift_log_trims_total",
    "fence": "swift_log_fences_total",
    "reset": "swift_log_resets_total",
}


class ObservedStorage:
    """Wraps a storage and counts its commits. All other calls pass through."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.appended_records: Counter[str] = Counter()
        self.appended_bytes: Counter[str] = Counter()
        self.acknowledged_records: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.commit_s = Distribution(LATENCY_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def commit(self, writes: Sequence[Write], sync: bool) -> list[Write]:
        """Counts and times a commit. Only the committer calls this, so the counters have one writer."""
        records: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for write in writes:
            job = write.job
            records[job] = records.get(job, 0) + 1
            sizes[job] = sizes.get(job, 0) + write.size
        for job, count in records.items():
            self.appended_records[job] += count
            self.appended_bytes[job] += sizes[job]
        began = time.monotonic()
        try:
            unmended = self._storage.commit(writes, sync)
        except Exception as error:
            self.failures[type(error).__name__] += 1
            raise
        self.commit_s.observe(time.monotonic() - began)
        for write in unmended:
            records[write.job] -= 1
        for job, count in records.items():
            self.acknowledged_records[job] += count
        return unmended


class ObservedFile:
    """Wraps a file and times its syncs."""

    def __init__(self, file: File, sync_s: Distribution) -> None:
        self._file = file
        self._sync_s = sync_s
        self.write = file.write
        self.read = file.read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        began = time.monotonic()
        self._file.sync()
        self._sync_s.observe(time.monotonic() - began)


class ObservedDisk:
    """Wraps a disk and times the syncs of its files. All other calls pass through."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.sync_s = Distribution(LATENCY_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def as_disk(self) -> Disk:
        return cast(Disk, self)

    def create(self, path: Path) -> ObservedFile:
        return ObservedFile(self._disk.create(path), self.sync_s)

    def open(self, path: Path) -> ObservedFile:
        return ObservedFile(self._disk.open(path), self.sync_s)


class _Context:
    """Wraps a call's context and reports why the call was refused."""

    def __init__(self, context: Any, told: Callable[[str], None]) -> None:
        self._context = context
        self._told = told
        self._reason = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def set_trailing_metadata(self, trailing: Any) -> None:
        for key, value in trailing:
            if key == REASON_KEY:
                self._reason = str(value)
        self._context.set_trailing_metadata(trailing)

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        self._told(self._reason or code.name.lower().replace("_", "-"))
        return self._context.abort(code, details)


class RefusalWatch(grpc.ServerInterceptor):
    """Interceptor that counts aborted calls by reason, whichever part of the server aborts them."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _told(self, reason: str) -> None:
        with self._lock:
            self.reasons[reason] += 1

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        kind = f"{'stream' if handler.request_streaming else 'unary'}_"
        kind += "stream" if handler.response_streaming else "unary"
        inner = getattr(handler, kind)

        def behaviour(request: Any, context: Any) -> Any:
            return inner(request, _Context(context, self._told))

        pool = getattr(inner, "experimental_thread_pool", None)
        behaviour.experimental_thread_pool = pool  # type: ignore[attr-defined]
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(behaviour, handler.request_deserializer, handler.response_serializer)


class LogMetrics:
    """Collects the metrics of a log server for `swift_ft.metrics.Exposition`."""

    def __init__(self, directory: Path, storage: Storage, disk: ObservedDisk) -> None:
        """``storage`` uses ``disk``; the engine gets `watched_storage` instead of it."""
        self._disk_watch = disk
        self.storage = ObservedStorage(storage)
        self.refusals = RefusalWatch()
        self._directory = directory
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _EVENTS.values()}
        self._freed: Counter[str] = Counter()
        self._dropped_jobs: Counter[str] = Counter()
        self._dropped_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._usage = (0, 0)
        self._usage_at = -_USAGE_MAX_AGE_S
        self.close = events.listen(self._heard)

    @property
    def watched_storage(self) -> Storage:
        """The wrapped storage, for the engine."""
        return cast(Storage, self.storage)

    def _heard(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "freed":
            with self._lock:
                self._freed[fields["job"]] += fields["bytes"]
        elif event == "dropped":
            why = "asked" if fields["reason"] == ASKED_FOR else "age"
            with self._lock:
                self._dropped_jobs[why] += 1
                self._dropped_bytes[why] += fields["bytes"]
        elif event in _EVENTS:
            with self._lock:
                self._counts[_EVENTS[event]][fields["job"]] += 1

    def samples(self, snapshot: EngineSnapshot) -> Samples:
        """Returns the value of every metric, by name and labels, at the time of the snapshot."""
        out: dict[str, Mapping[tuple[str, ...], Value]] = {
            "swift_log_state": plain(snapshot.state),
            "swift_log_appended_records_total": _by_label(self.storage.appended_records),
            "swift_log_appended_bytes_total": _by_label(self.storage.appended_bytes),
            "swift_log_acknowledged_records_total": _by_label(self.storage.acknowledged_records),
            "swift_log_commit_seconds": plain(self.storage.commit_s),
            "swift_log_sync_seconds": plain(self._disk_watch.sync_s),
            "swift_log_commit_failures_total": _by_label(self.storage.failures),
            "swift_log_queued_records": plain(snapshot.queued_records),
            "swift_log_unsynced_records": plain(snapshot.unsynced_records),
            "swift_log_sessions": plain(snapshot.sessions),
            "swift_log_credit_used_bytes": plain(snapshot.underway_bytes),
            "swift_log_credit_granted_bytes": plain(snapshot.credit_bytes),
            "swift_log_refusals_total": _by_label(self.refusals.reasons),
        }
        with self._lock:
            out |= {name: _by_label(count) for name, count in self._counts.items()}
            out["swift_log_freed_bytes_total"] = _by_label(self._freed)
            out["swift_log_dropped_jobs_total"] = _by_label(self._dropped_jobs)
            out["swift_log_dropped_bytes_total"] = _by_label(self._dropped_bytes)
        for name, field in _JOB_FIELDS.items():
            out[name] = {(job.job,): float(getattr(job, field)) for job in snapshot.jobs}
        return out | _space(snapshot) | self._disk()

    def _disk(self) -> dict[str, Mapping[tuple[str, ...], Value]]:
        now = time.monotonic()
        if now - self._usage_at >= _USAGE_MAX_AGE_S:
            self._usage = usage(self._directory)
            self._usage_at = now
        segments, used = self._usage
        space = os.statvfs(self._directory)
        return {
            "swift_log_segments": plain(segments),
            "swift_log_disk_used_bytes": plain(used),
            "swift_log_disk_free_bytes": plain(space.f_bavail * space.f_frsize),
            "swift_log_disk_size_bytes": plain(space.f_blocks * space.f_frsize),
        }


_JOB_FIELDS = {
    "swift_log_generation": "generation",
    "swift_log_trimmed_below_step": "trimmed_below_step",
    "swift_log_trim_waits": "trim_waits",
    "swift_log_streams": "streams",
    "swift_log_corrupt_streams": "corrupt_streams",
    "swift_log_held_records": "records",
    "swift_log_held_bytes": "bytes",
    "swift_log_readers": "readers",
    "swift_log_trimmed_bytes_total": "trimmed_bytes",
    "swift_log_checkpoint_wanted": "checkpoint_wanted",
}


def _space(snapshot: EngineSnapshot) -> dict[str, Mapping[tuple[str, ...], Value]]:
    """Returns the samples of quotas, limits and alarms. Unset quotas, and marks of unknown limits, are left out."""

    def known(name: str, jobs: Sequence[JobSnapshot]) -> Mapping[tuple[str, ...], Value]:
        return {(job.job,): value for job in jobs if (value := getattr(job.space, name))}

    server = {
        f"swift_log_{name}": plain(value)
        for name in ("quota_bytes", "limit_bytes", "high_mark_bytes", "low_mark_bytes")
        if (value := getattr(snapshot.space, name))
    }
    jobs = {
        f"swift_log_job_{name}": known(name, snapshot.jobs)
        for name in ("quota_bytes", "high_mark_bytes", "low_mark_bytes", "alarm")
    }
    used = plain(snapshot.space.used_bytes)
    return {**server, **jobs, "swift_log_used_bytes": used, "swift_log_alarm": plain(snapshot.space.alarm)}


def _by_label(count: Mapping[str, int]) -> Mapping[tuple[str, ...], Value]:
    # A copy in one step: another thread may add a label meanwhile.
    return {(label,): value for label, value in dict(count).items()}


def usage(directory: Path) -> tuple[int, int]:
    """Returns the number of segment files, and the disk space of all files. Skips files that vanish meanwhile."""
    segments = used = 0
    for entry in _files(directory):
        try:
            used += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        segments += entry.name.endswith(SUFFIX)
    return segments, used


def _files(directory: Path) -> Iterator["os.DirEntry[str]"]:
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        else:
            yield entry
