"""What recovery is decided from. All frozen. (`swift.recovery.decision` has what comes of it.)

A *version* of a state is the number of optimizer steps in it. Replaying from version a to version t means
doing the steps a, a+1, ..., t-1 again.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from swift.recovery.groups import RecoveryGroups


class Strategy(enum.StrEnum):
    """How a rank gets to the target version. `swift.recovery.strategies` has what each of them is.

    Names are in the trace, in the coordinator's rows and in the protocol: none is used again for something else.
    """

    KEEP = "KEEP"
    """Holds the target version already; drops the half-done step."""
    CATCH_UP = "CATCH_UP"
    """Holds an older version; replays from it out of the log."""
    REPLAY = "REPLAY"
    """Holds nothing of use; loads the checkpoint, replays from it out of the log."""
    CHECKPOINT = "CHECKPOINT"
    """Loads the checkpoint of the target version; nothing is replayed."""
    ROLL_FORWARD = "ROLL_FORWARD"
    """Finishes the step that is under way: all its gradients are reduced."""
    UNDO = "UNDO"
    """Takes the buckets that are applied back."""
    REPLICA = "REPLICA"
    """Receives the state from ranks that hold the same one (`RankPlan.sources`)."""
    SNAPSHOT = "SNAPSHOT"
    """Goes back to a copy in host memory: its own one, or one that another rank keeps of it (`RankPlan.sources`)."""
    LOSSY_FORWARD = "LOSSY_FORWARD"
    """Finishes the step that is under way with the gradients of those that are left."""


class HeldSnapshot(NamedTuple):
    """A copy of a rank's state in the host memory of a process."""

    rank: int
    """Whose state it is: of the rank that holds it, or of another one."""
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank says it holds."""

    rank: int
    """The number of its slot, as everywhere in reports and plans (`swift.recovery.assignment`)."""
    version: int | None
    """Held whole. None: none (a fresh process, or an update was interrupted half-way)."""
    undo_to: int | None = None
    """The version that taking the applied buckets back leads to; None: they cannot be."""
    undo_exact: bool = False
    """Bit for bit."""
    forward_to: int | None = None
    """The version that finishing the step under way leads to; None: not all its gradients are reduced."""
    forward_by_all: bool = False
    """... but a rank that has not voted for it may lack what is done before that (swift.recovery.finishing)."""
    finish_to: int | None = None
    """The version that finishing the step under way leads to if all that are left are in it; None: it is not kept."""
    since_generation: int = 1
    """The generation in which its process took the rank."""
    host: str = ""
    """Where it runs; empty: not known."""
    can_help: bool = False
    """It can build any stage, to replay microbatches of it for another rank."""
    off_log: bool = False
    """What it holds is not what the checkpoints and the log lead to (swift.recovery.off_log)."""
    snapshots: tuple[HeldSnapshot, ...] = ()
    """The copies that it holds in host memory, of its own state and of other ranks'."""

    @property
    def newest(self) -> int | None:
        """The highest version that it holds or gets to by itself, alone. Every step before it was done here."""
        ways = (self.version, self.undo_to, self.forward_to)
        return max((version for version in ways if version is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """The complete checkpoints: the shard of every slot that is held is durable."""

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
    """Why it is corrupt, or why it begins so late."""
    unlogged: tuple[int, int] | None = None
    """The first and the last step that are declared not to be whole (`swift.log.unlogged`)."""
    marks: int = 0
    """How many of the records declare this; the others are tensors."""


STRATEGIES = (
    "auto",
    "replica",
    "replay",
    "checkpoint",
    "shrink",
    "adaptive",
    "rollback",
    "lossy-forward",
    "snapshot",
    "reinit",
)
FROM_CHECKPOINT = frozenset({"checkpoint", "reinit"})
"""Those under which all go back to the checkpoint, whatever is left."""
SNAPSHOTTING = frozenset({"auto", "snapshot"})
"""Those under which all may go back to snapshots, if there are any."""
SHRINKING = frozenset({"shrink", "adaptive", "rollback", "lossy-forward"})
"""Those under which the others go on without a rank that is lost, in a smaller world."""
LOST_SHARDS = ("redistribute", "reroute", "drop")
"""Under these: who computes the batches of a lost data-parallel rank. Another one each of them, its peers together by
microbatches (pipelines), or nobody."""

QUICKEST = "quickest"
"""Instead of one of these: the one with which steps are shortest while a rank is missing
(`swift.recovery.waiting.quickest`)."""


def shrinks(strategy: str) -> bool:
    """A job with this strategy goes on without a rank that is lost."""
    return strategy in SHRINKING


def reroutes(strategy: str, lost_shard: str) -> bool:
    """Microbatches of a lost rank go to its peers, each by itself, in the step of all."""
    return strategy == "adaptive" or (strategy == "auto" and lost_shard == "reroute")


def lost_shard_problem(strategy: str, lost_shard: str) -> str:
    """Why `lost_shard` cannot be asked for with this strategy; empty: it can, or nothing is asked for."""
    if lost_shard and strategy != "auto" and not shrinks(strategy):
        return "a lost rank comes back, and computes its batches itself; leave it out, or use shrink, rollback or auto"
    if strategy == "adaptive" and lost_shard == "drop":
        return "the peers of a lost rank compute its microbatches; leave it out, or use shrink"
    if lost_shard == QUICKEST and strategy != "auto":
        return "only auto chooses; leave it out"
    if lost_shard == "reroute" and strategy not in ("auto", "adaptive"):
        return "one rank computes a lost one's batch; leave it out, or use adaptive"
    if strategy == "lossy-forward" and lost_shard == "redistribute":
        return "nobody computes the batches of a lost rank; leave it out, or use shrink or rollback"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """What the operator wants."""

    strategy: str = "auto"
    """"auto": without replay if every stage reaches one version so, else by replay, or by snapshots if there are any
    and that takes less time, else the checkpoint;
    "replica": the same, but nothing is ever replayed; "replay": nothing is ever copied, a stage with a rank that
    holds nothing is replayed; "checkpoint": always restore the checkpoint; "shrink": the others go on without a rank
    that is lost, and nothing is replayed; "adaptive": the same, and its peers share its microbatches;
    "rollback": the same, but the step that was interrupted is never finished;
    "lossy-forward": the same, but it is finished with the gradients of those that are left; "snapshot": all go back
    to the newest copies in host memory, and nothing is copied from replicas or replayed; "reinit": as "checkpoint",
    which ranks load where their training function begins again."""
    inexact_undo: bool = False
    """An undo that is not bit for bit may be used."""
    groups: RecoveryGroups = RecoveryGroups()  # noqa: RUF009  (frozen)
    """Stages that recover together."""
    groups_since: int = 0
    """The version since when the log has what crosses these."""
    helpers: int = 0
    """So many other ranks, at most, share a replay with its owner."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is not known: use one of {', '.join(STRATEGIES)}")
