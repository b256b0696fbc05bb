"""Input types of the planner: what ranks report and the log holds. All are frozen.

What ranks have measured is a message (`RankMeasured`), which takes this way while the job runs:

(rank) `swift_ft.train.profiling`, every few seconds → (coordinator) keeps the newest of each rank in memory → `plan()`
and `swift-ft plan --coordinator`. After a restart of the coordinator, ranks send them again. The measurements of a dead
rank are kept.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from swift_ft.log.record import Steps

# Recovery is decided from these types. `swift_ft.planner.decision` has the result.
#
# A *version* of a state is the number of optimizer steps in it. Replaying from version a to version t means recomputing
# the steps a, a+1, ..., t-1.


class Strategy(enum.StrEnum):
    """The way in which a rank gets to the target version. `swift_ft.planner.strategies` defines each strategy.

    The names appear in the trace, in the coordinator's rows and in the protocol, so a name must never be reused.
    """

    KEEP = "KEEP"
    """Already holds the target version; drops the half-done step."""
    CATCH_UP = "CATCH_UP"
    """Holds an older version; replays from it out of the log."""
    REPLAY = "REPLAY"
    """Holds no usable state; loads the checkpoint and replays from it out of the log."""
    CHECKPOINT = "CHECKPOINT"
    """Loads the checkpoint of the target version; no step is replayed."""
    ROLL_FORWARD = "ROLL_FORWARD"
    """Finishes the step under way, whose gradients are all reduced."""
    UNDO = "UNDO"
    """Reverts the update of the buckets that are already applied."""
    REPLICA = "REPLICA"
    """Receives the state from replicas (`RankPlan.sources`)."""
    SNAPSHOT = "SNAPSHOT"
    """Goes back to a copy in host memory: its own, or one that another rank keeps of it (`RankPlan.sources`)."""
    LOSSY_FORWARD = "LOSSY_FORWARD"
    """Finishes the step under way with the gradients of the remaining ranks."""


class HeldSnapshot(NamedTuple):
    """A copy of a rank's state in the host memory of a process."""

    rank: int
    """The rank whose state it is, which need not be the rank that holds it."""
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The state that one rank reports to hold."""

    rank: int
    """The number of its slot, as everywhere in reports and plans (`swift_ft.planner.assignment`)."""
    version: int | None
    """The version held completely. None: none (a new process, or an update was interrupted half-way)."""
    undo_to: int | None = None
    """The version that reverting the applied buckets leads to; None: they cannot be reverted."""
    undo_exact: bool = False
    """The undo is bit-exact."""
    forward_to: int | None = None
    """The version that finishing the step under way leads to; None: not all its gradients are reduced."""
    forward_by_all: bool = False
    """A rank that has not voted for `forward_to` may lack what ranks do before their vote (`finishable`)."""
    finish_to: int | None = None
    """The version that finishing the step under way leads to if all remaining ranks are in it; None: the step's
    averaged gradients are not kept."""
    since_generation: int = 1
    """The generation in which its process took the rank."""
    host: str = ""
    """The rank's host; empty: unknown."""
    can_help: bool = False
    """It can build any stage, to replay microbatches of it for another rank."""
    snapshots: tuple[HeldSnapshot, ...] = ()
    """The copies that it holds in host memory, of its own state and of other ranks'."""

    @property
    def newest(self) -> int | None:
        """The highest version that the rank holds or reaches without other ranks. It has computed every step before
        it."""
        ways = (self.version, self.undo_to, self.forward_to)
        return max((version for version in ways if version is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSummary:
    """The log's contents of one stream."""

    stream: str
    records: int
    first_step: int = -1
    """The lowest step with a record; -1: no record."""
    last_step: int = -1
    """The highest step with a record; -1: no record."""
    trimmed_below_step: int = 0
    corrupt: bool = False
    reason: str = ""
    """Why it is corrupt, or why its first step is not lower."""
    unlogged: Steps | None = None
    """The steps that are declared incomplete (`swift_ft.log.record`)."""
    marks: int = 0
    """The number of records that declare incomplete steps; the other records are tensors."""
