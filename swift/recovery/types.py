"""What recovery is decided from, and the decision. All frozen.

A *version* of a state is the number of optimizer steps in it. Replaying from version a to version t means
doing the steps a, a+1, ..., t-1 again.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from swift.recovery.groups import RecoveryGroups


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
    ROLL_FORWARD = "ROLL_FORWARD"
    """Finishes the step that is under way: all its gradients are reduced."""
    UNDO = "UNDO"
    """Takes the buckets that are applied back."""
    REPLICA = "REPLICA"
    """Receives the state from ranks that hold the same one (`RankPlan.sources`)."""


REPLAYS = (Strategy.CATCH_UP, Strategy.REPLAY)
"""What does nothing but replay. ROLL_FORWARD, UNDO and REPLICA to an older version are followed by a replay."""


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
    since_generation: int = 1
    """The generation in which its process took the rank."""
    host: str = ""
    """Where it runs; empty: not known."""
    can_help: bool = False
    """It can build any stage, to replay microbatches of it for another rank."""
    off_log: bool = False
    """What it holds is not what the checkpoints and the log lead to (swift.recovery.off_log)."""

    @property
    def newest(self) -> int | None:
        """The highest version that it holds or gets to by itself. Every step before it was done here."""
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


STRATEGIES = ("auto", "replica", "replay", "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """What the operator wants."""

    strategy: str = "auto"
    """"auto": without replay if every stage reaches one version so, else by replay, else the checkpoint;
    "replica": the same, but nothing is ever replayed; "replay": nothing is ever copied, a stage with a rank that
    holds nothing is replayed; "checkpoint": always restore the checkpoint."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusals:
    """What ranks refused to do in this recovery: it is not planned again before the job runs."""

    strategies: tuple[Strategy, ...] = ()
    """In the order of Strategy. KEEP among them: nothing but a checkpoint will do."""
    reason: str = ""
    """Of the latest one, for people."""
    help: bool = False
    """Something went wrong in a replay that others helped with: each owner replays alone."""

    @property
    def replays(self) -> bool:
        return any(strategy in self.strategies for strategy in REPLAYS)

    @property
    def everything(self) -> bool:
        return Strategy.KEEP in self.strategies

    def and_of(self, strategies: Iterable[Strategy], reason: str) -> "Refusals":
        """These as well, for `reason`. CHECKPOINT is not counted: which one cannot be loaded matters there."""
        union = {*self.strategies, *strategies} - {Strategy.CHECKPOINT}
        ordered = tuple(s for s in Strategy if s in union)
        return Refusals(strategies=ordered, reason=reason, help=self.help)

    def and_everything(self, reason: str) -> "Refusals":
        return self.and_of(Strategy, reason)

    def and_help(self, reason: str) -> "Refusals":
        return replace(self, help=True, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What one rank does."""

    rank: int
    strategy: Strategy
    from_version: int
    """What the strategy leads to, and where replay starts; equal to the target: nothing to replay."""
    reason: str
    sources: tuple[int, ...] = ()
    """REPLICA: the ranks that have, or get to, `from_version`, nearest first; they share the work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Help:
    """A replay that others share: of every step they compute some of the microbatches."""

    owner: int
    """The rank that replays."""
    helpers: tuple[int, ...]
    """Ranks that keep their own state meanwhile, nearest first."""
    until: int
    """The version at which they are done; the owner replays what is left alone."""
    together: tuple[int, ...] = ()
    """(a recovery group of several stages) Its ranks by stage, the owner among them: all have a help alike, and the
    first helpers of all of them are one copy of the group, the second ones another. Empty: the owner alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Of one rank's replay, from the moment that it has the state to begin with."""

    rank: int
    workers: int
    """Ranks that do it: its own, and helpers."""
    steps: int
    seconds: float
    alone_s: float
    """If nobody helped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How all ranks get to `target_version`."""

    target_version: int
    ranks: tuple[RankPlan, ...]
    """By rank, one for each."""
    collective_source: int
    """The rank whose stream of collective results covers every replayed step; -1: none needed."""
    reason: str
    exact: bool = True
    """False: an undo that is not bit for bit is used, or a rank keeps a state that the log does not lead to."""
    help: tuple[Help, ...] = ()
    saves: bool = False
    """Every rank saves the target before it is Ready; the next generation gives up the log (swift.recovery.off_log)."""
    predictions: tuple[Prediction, ...] = ()
    """Of the replays whose costs are known."""
    groups: str = ""
    """By which stages replay together; empty: each rank by itself."""

    @property
    def restores(self) -> bool:
        """Everybody loads the checkpoint; nothing of the log is used."""
        return all(rank_plan.strategy is Strategy.CHECKPOINT for rank_plan in self.ranks)

    @property
    def gives_up_log(self) -> bool:
        """The job's state is not what the log and the checkpoints lead to any more: its records go."""
        return self.restores or not (self.exact or self.saves or self.reads_log)

    @property
    def reads_log(self) -> bool:
        """Some rank replays."""
        return any(rank_plan.from_version < self.target_version for rank_plan in self.ranks)

    def of(self, rank: int) -> RankPlan:
        return next(rank_plan for rank_plan in self.ranks if rank_plan.rank == rank)
