"""Input types of the planner: what ranks report, what they have measured, and the configuration. All are frozen and
validated on construction.

Measurements take this way while the job runs:

(rank) `swift_ft.train.profiling`, every few seconds → (coordinator) keeps the newest of each rank in memory → `plan()`
and `swift-ft plan --coordinator`. After a restart of the coordinator, ranks send them again. The measurements of a dead
rank are kept.
"""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

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
class Checkpoints:
    """The complete checkpoints: those in which the shard of every held slot is durable."""

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
    unlogged: tuple[int, int] | None = None
    """The first and the last step that are declared incomplete (`swift_ft.log.record`)."""
    marks: int = 0
    """The number of records that declare incomplete steps; the other records are tensors."""


STAGES_MAX = 64
"""Limit of stages that one rank runs."""
DESTINATIONS_MAX = 16
"""Limit of stages that one stage sends to."""
STAGE_INDEX_MAX = 1 << 20
COUNT_MAX = 1 << 62
SECONDS_MAX = 1e9
RATE_MAX = 1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """The data that a stage sends to another one in a step, whether it is logged or not."""

    destination: int
    """The receiving stage."""
    bytes: int

    def __post_init__(self) -> None:
        _whole("destination", self.destination, STAGE_INDEX_MAX)
        _whole("bytes", self.bytes, COUNT_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMeasured:
    """Measurements of one stage. Seconds are medians over recent steps, without replayed steps and without waits for
    other ranks."""

    stage: int
    forward_s: float
    """Seconds of one microbatch's forward."""
    backward_s: float
    """Seconds of one microbatch's backward, including weight gradients that are computed separately."""
    sent: tuple[Sent, ...] = ()
    gradient_bytes: int = 0
    """Bytes of the gradients of the trained parameters."""

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
    """Measurements of one rank. None: not measured yet."""

    step: int
    """The last measured step."""
    steps: int
    """The number of measured steps."""
    microbatches: int
    """Microbatches in one step."""
    step_s: float
    """Seconds of a whole step, waits for others included."""
    update_s: float
    """Seconds of a step after its last microbatch and its last wait, as for the optimizer; or all its time outside of
    microbatches, if that is more."""
    stages: tuple[StageMeasured, ...]
    """Ascending by index."""
    other_bytes: int = 0
    """Bytes per step of external inputs, targets and results of collectives: logged as soon as there are two groups."""
    state_bytes: int | None = None
    """Bytes of the tensors in a checkpoint: parameters, optimizer, buffers."""
    checkpoint_bytes: int | None = None
    """Bytes of the checkpoint's files."""
    checkpoint_s: float | None = None
    """Seconds from the end of the checkpoint's step until it was durable."""
    checkpoint_stall_s: float | None = None
    """Seconds for which the checkpoint blocked the trainer."""
    log_write_bytes_per_s: float | None = None
    """Raw bytes per second that the log took while it had records to take."""
    log_full: bool = False
    """Training has recently waited for the log, or records were dropped: `log_write_bytes_per_s` is the log's limit."""
    log_read_bytes: int | None = None
    """Bytes that the last replay on this rank read from the log."""
    log_read_wait_s: float | None = None
    """Seconds for which that replay waited for the log."""

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
