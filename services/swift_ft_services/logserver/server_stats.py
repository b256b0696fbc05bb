"""Snapshot of the server's state as plain numbers: taken while holding the lock, exported without it."""

from dataclasses import dataclass
from typing import Self

from swift_ft_services.logserver.core import JobState
from swift_ft_services.logserver.quotas import AccountSnapshot, Space


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSnapshot:
    """State of one job in plain numbers."""

    job: str
    generation: int
    trimmed_below_step: int
    streams: int
    corrupt_streams: int
    records: int
    bytes: int
    readers: int
    trim_waits: bool
    """True if a requested trim waits for readers."""
    trimmed_bytes: int
    """Bytes trimmed since the process started."""
    checkpoint_wanted: bool
    """True if the coordinator should save an early checkpoint."""
    space: AccountSnapshot

    @classmethod
    def of(cls, job: JobState, space: Space, wants_checkpoint: str) -> Self:
        """Takes the snapshot; called while the server's lock is held."""
        streams = job.streams.values()
        return cls(
            job=job.name,
            generation=job.generation,
            trimmed_below_step=job.trimmed_below_step,
            streams=len(streams),
            corrupt_streams=sum(1 for stream in streams if stream.corrupt_reason),
            records=job.tally.records,
            bytes=job.tally.bytes,
            readers=len(job.readers),
            trim_waits=job.trim_wanted > job.trimmed_below_step,
            trimmed_bytes=space.trimmed[job.name],
            checkpoint_wanted=bool(wants_checkpoint),
            space=space.snapshot(job.name),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSnapshot:
    """State of the whole server in plain numbers."""

    state: str
    queued_records: int
    """Records accepted, and not acknowledged yet."""
    unsynced_records: int
    """Records accepted, and not synced yet; with fsync "never" almost all."""
    sessions: int
    underway_bytes: int
    """Credit used by writers."""
    credit_bytes: int
    """Total credit granted to writers."""
    space: AccountSnapshot
    jobs: list[JobSnapshot]
