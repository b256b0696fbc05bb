"""The decision: how every rank gets to the target version. All frozen.

`plan()` makes it, `swift_ft.rpc.codec` is its way over the wire, and ranks carry it out. Whatever follows from a plan
is said here, and nowhere concluded again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from swift_ft.planner.strategies import TABLE, Begins, Policy
from swift_ft.planner.types import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What one rank does."""

    rank: int
    strategy: Strategy
    from_version: int
    """What the strategy leads to, and where replay starts; equal to the target: nothing to replay."""
    reason: str
    sources: tuple[int, ...] = ()
    """(Begins.COPY) The ranks that have, or get to, `from_version`, nearest first; they share the work.
    (Begins.SNAPSHOT) Who keeps this rank's state; nobody: it takes its own copy."""

    @property
    def policy(self) -> Policy:
        return TABLE[self.strategy]

    @property
    def loads(self) -> bool:
        """It loads its checkpoint, or a snapshot: whatever it has done since is done again, or given up."""
        return self.policy.begins in (Begins.CHECKPOINT, Begins.SNAPSHOT)


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
    """Every rank saves the target before it is Ready; the next generation gives up the log (swift_ft.planner.plan)."""
    predictions: tuple[Prediction, ...] = ()
    """Of the replays whose costs are known."""

    @property
    def restores(self) -> bool:
        """Everybody goes back, to the checkpoint or to a snapshot; nothing of the log is used."""
        return all(rank_plan.policy.goes_back for rank_plan in self.ranks)

    @property
    def gives_up_log(self) -> bool:
        """The job's state is not what the log and the checkpoints lead to any more: its records go."""
        return self.restores or not (self.exact or self.saves or self.reads_log)

    @property
    def saves_once_running(self) -> bool:
        """Every rank saves the target as soon as the job runs: from before nothing leads there any more."""
        return not (self.exact or self.saves)

    @property
    def costliest(self) -> Strategy:
        """What the recovery is counted as: of its ranks' strategies, the one that costs most."""
        by_cost = list(TABLE)
        return max((r.strategy for r in self.ranks), key=by_cost.index)

    @property
    def reads_log(self) -> bool:
        """Some rank replays."""
        return bool(self.replayed_from)

    @property
    def replayed_from(self) -> Mapping[int, int]:
        """Each rank that replays, and from which version."""
        return {r.rank: r.from_version for r in self.ranks if r.from_version < self.target_version}

    @property
    def log_readers(self) -> frozenset[int]:
        """The ranks that read the log, of other ranks' streams: they replay, or help with a replay."""
        helping = {rank for help in self.help for rank in (help.owner, *help.helpers)}
        return frozenset(helping.union(self.replayed_from))

    @property
    def copies(self) -> tuple[RankPlan, ...]:
        """Of the ranks that are sent their state by another one, in the order in which all take part in them."""
        copying = (r for r in self.ranks if r.policy.begins is Begins.COPY or r.sources)
        return tuple(sorted(copying, key=lambda r: r.rank))

    @property
    def collective_sources(self) -> tuple[int, ...]:
        """Ranks that have done all steps below the target themselves, `collective_source` first: the result of a
        collective of some ranks is in the logs of those alone. Empty: none is needed."""
        if self.collective_source < 0:
            return ()
        done = (
            r.rank
            for r in self.ranks
            if r.policy.begins is Begins.OWN and r.from_version == self.target_version
        )
        return tuple(dict.fromkeys((self.collective_source, *done)))

    def of(self, rank: int) -> RankPlan:
        return next(rank_plan for rank_plan in self.ranks if rank_plan.rank == rank)

    def redoes(self, rank: int) -> bool:
        """The rank replays, or would if the state it begins with were not the target already."""
        return rank in self.replayed_from or self.of(rank).policy.replays

    def was_logged(self, rank: int) -> bool:
        """What the rank does next, be it a replay or the step behind the target, may be in its streams already: it goes
        on with a state that is not its own, and of an earlier moment."""
        return self.of(rank).policy.begins is not Begins.OWN and self.redoes(rank)

    def help_of(self, rank: int) -> Help | None:
        """The shared replay in which the rank takes part, as its owner or as a helper."""
        return next((help for help in self.help if rank in (help.owner, *help.helpers)), None)

    def predicted_s(self, rank: int) -> float | None:
        """How long its replay takes; None: that is not known."""
        return next((prediction.seconds for prediction in self.predictions if prediction.rank == rank), None)
