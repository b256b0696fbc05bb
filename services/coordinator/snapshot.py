"""What a job stands at in one moment, as plain numbers, for those who watch."""

from dataclasses import dataclass
from typing import Self

from services.coordinator.core import Job
from services.coordinator.log_placement import unreplaced
from swift.recovery import RecoveryGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSnapshot:
    """One job in numbers."""

    job: str
    state: str
    generation: int
    world_size: int
    live_ranks: int
    oldest_lease_s: float
    suspicions: int
    blocked_log_servers: int
    lost_log_servers: int
    """... and not replaced; none once the job is over."""
    newest_version: int
    """Of all ranks, by their heartbeats."""
    measured_ranks: int
    """Of which it is known what their steps take."""
    groups: int
    """Recovery groups in force; 0: every rank is one by itself."""
    groups_wanted: bool
    """Others are to come into force."""
    checkpoint: int | None
    """The newest complete checkpoint's version."""
    unsaved_ranks: int = 0
    """They cannot write their newest checkpoint."""
    replay_steps_left: int = 0
    """Of the rank that replays most; 0: none does."""
    replay_seconds_left: float | None = 0.0
    """Of the one that takes longest; None: nobody knows."""

    @classmethod
    def of(cls, job: Job, now: float) -> Self:
        """Takes it; `now` is in seconds of the monotonic clock."""
        row = job.row
        leased = (
            [] if row.state.is_over else [rank for rank, holder in row.holders.items() if not holder.gone]
        )
        return cls(
            job=row.job,
            state=str(row.state),
            generation=row.generation,
            world_size=row.world_size,
            live_ranks=len(row.holders),
            oldest_lease_s=max((job.leases.age_s(rank, now) for rank in leased), default=0.0),
            suspicions=len(job.suspicions.all(row, now)),
            blocked_log_servers=len(row.blocked),
            lost_log_servers=0 if row.state.is_over else len(unreplaced(row)),
            newest_version=max((job.steps.version(rank) for rank in row.holders), default=0),
            measured_ranks=len(job.measured),
            groups=len(RecoveryGroups.parse(row.groups).starts),
            groups_wanted=bool(row.groups_next),
            checkpoint=row.checkpoints[-1] if row.checkpoints else None,
            unsaved_ranks=0 if row.state.is_over else len(job.checkpoints.unsaved),
            replay_steps_left=max((max(0, r.target - r.version) for r in job.replays.values()), default=0),
            replay_seconds_left=_longest([r.seconds_left for r in job.replays.values()]),
        )


def _longest(seconds: list[float | None]) -> float | None:
    return max((one for one in seconds if one is not None), default=None if seconds else 0.0)
