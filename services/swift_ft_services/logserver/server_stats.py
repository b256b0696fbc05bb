"""What the server does at one moment, as plain numbers: taken under the lock, shown outside of it."""

from dataclasses import dataclass
from typing import Self

from swift_ft_services.logserver.core import JobState
from swift_ft_services.logserver.quotas import AccountSnapshot, Space


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSnapshot:
    """One job in numbers."""

    job: str
    generation: int
    trimmed_below_step: int
    streams: int
    corrupt_streams: int
    records: int
    bytes: int
    readers: int
    trim_waits: bool
    """A trim was asked for that readers hold up."""
    trimmed_bytes: int
    """Since the process began."""
    checkpoint_wanted: bool
    """Its coordinator is asked for an early one."""
    space: AccountSnapshot

    @classmethod
    def of(cls, job: JobState, space: Space, wants_checkpoint: str) -> Self:
        """Takes it, while the server's lock is held."""
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
    """The whole server in numbers."""

    state: str
    queued_records: int
    """Accepted, and not acknowledged yet."""
    unsynced_records: int
    """Accepted, and not covered by a sync yet; with fsync "never" these are almost all."""
    sessions: int
    underway_bytes: int
    """Credit that writers have used up."""
    credit_bytes: int
    """Credit that writers have in all."""
    space: AccountSnapshot
    jobs: list[JobSnapshot]
