"""The types that the planner decides from: what ranks report, what they have measured, and the configuration.

What a rank has measured of its own steps, while the job runs. All frozen, and valid once it exists.

(rank) `swift_ft.train.profiling`, every few seconds → (coordinator) kept in memory, the newest of each rank → `plan()`,
and `swift-ft plan --coordinator`. After a restart of the coordinator it comes again; what a rank that is dead has said
before stays.
"""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

from swift_ft.planner.groups import RecoveryGroups

# What recovery is decided from. All frozen. (`swift_ft.planner.decision` has what comes of it.)
#
# A *version* of a state is the number of optimizer steps in it. Replaying from version a to version t means
# doing the steps a, a+1, ..., t-1 again.


class Strategy(enum.StrEnum):
    """How a rank gets to the target version. `swift_ft.planner.strategies` has what each of them is.

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
    """The number of its slot, as everywhere in reports and plans (`swift_ft.planner.assignment`)."""
    version: int | None
    """Held whole. None: none (a fresh process, or an update was interrupted half-way)."""
    undo_to: int | None = None
    """The version that taking the applied buckets back leads to; None: they cannot be."""
    undo_exact: bool = False
    """Bit for bit."""
    forward_to: int | None = None
    """The version that finishing the step under way leads to; None: not all its gradients are reduced."""
    forward_by_all: bool = False
    """... but a rank that has not voted for it may lack what is done before that (swift_ft.planner.plan)."""
    finish_to: int | None = None
    """The version that finishing the step under way leads to if all that are left are in it; None: it is not kept."""
    since_generation: int = 1
    """The generation in which its process took the rank."""
    host: str = ""
    """Where it runs; empty: not known."""
    can_help: bool = False
    """It can build any stage, to replay microbatches of it for another rank."""
    off_log: bool = False
    """What it holds is not what the checkpoints and the log lead to (swift_ft.planner.plan)."""
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
    """The first and the last step that are declared not to be whole (`swift_ft.log.record`)."""
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
(`swift_ft.planner.assignment.quickest`)."""


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
    helpers: int = 0
    """So many other ranks, at most, share a replay with its owner."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is not known: use one of {', '.join(STRATEGIES)}")


STAGES_MAX = 64
"""That one rank runs."""
DESTINATIONS_MAX = 16
"""Stages that one stage sends to."""
STAGE_INDEX_MAX = 1 << 20
COUNT_MAX = 1 << 62
SECONDS_MAX = 1e9
RATE_MAX = 1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What a stage gives to another one in a step, whether it is logged or not."""

    destination: int
    """The other stage."""
    bytes: int

    def __post_init__(self) -> None:
        _whole("destination", self.destination, STAGE_INDEX_MAX)
        _whole("bytes", self.bytes, COUNT_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMeasured:
    """One stage. Seconds are medians over recent steps, replayed ones left out, without any wait for others."""

    stage: int
    forward_s: float
    """One microbatch."""
    backward_s: float
    """One microbatch; gradients of weights that are computed apart are in it."""
    sent: tuple[Sent, ...] = ()
    gradient_bytes: int = 0
    """Of the parameters that are trained."""

    def __post_init__(self) -> None:
        _whole("stage", self.stage, STAGE_INDEX_MAX)
        _number("forward_s", self.forward_s, SECONDS_MAX)
        _number("backward_s", self.backward_s, SECONDS_MAX)
        _whole("gradient_bytes", self.gradient_bytes, COUNT_MAX)
        if len(self.sent) > DESTINATIONS_MAX:
            raise ValueError(
                f"stage {self.stage} sends to {len(self.sent)} stages: at most {DESTINATIONS_MAX}"
            )
        if len({sent.destination for sent in self.sent}) < len(self.sent):
            raise ValueError(f"stage {self.stage} names a destination twice")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasured:
    """One rank. None: not measured yet."""

    step: int
    """The last one that is in it."""
    steps: int
    """So many are in it."""
    microbatches: int
    """Of one step."""
    step_s: float
    """A whole step, waits for others included."""
    update_s: float
    """What a step takes behind its last microbatch and its last wait, as for the optimizer; what it does besides
    its microbatches in all, if that is more."""
    stages: tuple[StageMeasured, ...]
    """By their index."""
    other_bytes: int = 0
    """External inputs, targets and results of collectives, of one step: logged as soon as there are two groups."""
    state_bytes: int | None = None
    """Of the tensors in a checkpoint: parameters, optimizer, buffers."""
    checkpoint_bytes: int | None = None
    """Of its files."""
    checkpoint_s: float | None = None
    """From the end of its step until it was durable."""
    checkpoint_stall_s: float | None = None
    """For which it held the trainer up."""
    log_write_bytes_per_s: float | None = None
    """Raw bytes that the log took while there was something to take."""
    log_full: bool = False
    """Training has waited for the log lately, or records were dropped: it takes no more than that."""
    log_read_bytes: int | None = None
    """That the last replay on this rank got out of the log."""
    log_read_wait_s: float | None = None
    """For which it waited for these."""

    def __post_init__(self) -> None:
        for name in (
            "step",
            "microbatches",
            "other_bytes",
            "state_bytes",
            "checkpoint_bytes",
            "log_read_bytes",
        ):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, COUNT_MAX)
        if self.steps < 1:
            raise ValueError("steps is 0: nothing was measured")
        _whole("steps", self.steps, COUNT_MAX)
        for name in ("step_s", "update_s", "checkpoint_s", "checkpoint_stall_s", "log_read_wait_s"):
            value = getattr(self, name)
            if value is not None:
                _number(name, value, SECONDS_MAX)
        if self.log_write_bytes_per_s is not None:
            _number("log_write_bytes_per_s", self.log_write_bytes_per_s, RATE_MAX)
        if len(self.stages) > STAGES_MAX:
            raise ValueError(f"{len(self.stages)} stages: a rank runs at most {STAGES_MAX}")
        indices = [stage.stage for stage in self.stages]
        if indices != sorted(set(indices)):
            raise ValueError(f"stages must ascend: {indices}")


def _whole(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value}: must be from 0 to {most}")


def _number(name: str, value: float, most: float) -> None:
    if not math.isfinite(value) or not 0 <= value <= most:
        raise ValueError(f"{name} is {value}: must be from 0 to {most:g}")
