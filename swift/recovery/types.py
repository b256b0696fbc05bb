"""What recovery is decided from, and the decision. All frozen.

A *version* of a state is the number of optimizer steps in it. Replaying from version a to version t means
doing the steps a, a+1, ..., t-1 again.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Strategy(enum.StrEnum):
    """How a rank gets to the target version."""

    KEEP = "KEEP"
    """Holds the target version already; drops the half-done step."""
    CATCH_UP = "CATCH_UP"
    """Holds an older version; replays from it out of the log."""
    REPLAY = "REPLAY"
    """Holds nothing of use; loads the checkpoint, replays from it out of the log."""
    CHECKPOINT = "CHECKPOINT"
    """Loads the checkpoint of the target version; nothing is replayed."""


REPLAYS = (Strategy.CATCH_UP, Strategy.REPLAY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank says it holds."""

    rank: int
    version: int | None
    """None: no state (a fresh process, or an update was interrupted half-way)."""
    since_generation: int = 1
    """The generation in which its process took the rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """The complete (every rank's shard is durable) checkpoints."""

    versions: tuple[int, ...] = ()
    """Ascending."""

    def __post_init__(self) -> None:
        if list(self.versions) != sorted(set(self.versions)):
            raise ValueError(f"checkpoint versions must ascend: {self.versions}")

    @property
    def newest(self) -> int | None:
        return self.versions[-1] if self.versions else None

    def newest_at_most(self, version: int) -> int | None:
        return max((v for v in self.versions if v <= version), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which stages each rank runs (several, with looped and V-schedules)."""

    num_stages: int
    stages: Mapping[int, tuple[int, ...]]
    """rank -> its stages, for every rank of the job."""

    def owners(self, stage: int) -> tuple[int, ...]:
        return tuple(rank for rank in sorted(self.stages) if stage in self.stages[rank])


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSummary:
    """What the log has of one stream."""

    stream: str
    records: int
    first_step: int = -1
    """The lowest step of which there is a record; -1: none."""
    last_step: int = -1
    """The highest one."""
    trimmed_below_step: int = 0
    corrupt: bool = False
    reason: str = ""
    """Why it is corrupt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """What the operator wants."""

    strategy: str = "auto"
    """"auto" or "replay": replay where the log allows it; "checkpoint": always restore the checkpoint."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is not known: use one of {', '.join(STRATEGIES)}")


STRATEGIES = ("auto", "replay", "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What one rank does."""

    rank: int
    strategy: Strategy
    from_version: int
    """Where replay starts; equal to the target: nothing to replay."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How all ranks get to `target_version`."""

    target_version: int
    ranks: tuple[RankPlan, ...]
    """By rank, one for each."""
    collective_source: int
    """The rank whose stream of collective results covers every replayed step; -1: none needed."""
    reason: str

    @property
    def restores(self) -> bool:
        """Everybody loads the checkpoint; nothing of the log is used."""
        return all(rank_plan.strategy is Strategy.CHECKPOINT for rank_plan in self.ranks)

    def of(self, rank: int) -> RankPlan:
        return next(rank_plan for rank_plan in self.ranks if rank_plan.rank == rank)
