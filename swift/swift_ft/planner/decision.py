"""The decision: how every rank gets to the target version. Nobody changes it.

`plan()` creates it, `swift_ft.coordinator_messages` encodes it for the wire, and ranks carry it out. Everything that
follows from a plan is a property here, so that no other module derives it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.planner.strategies import TABLE, Begins, Policy
from swift_ft.planner.types import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """The part of one rank."""

    rank: int
    strategy: Strategy
    from_version: int
    """The version that the strategy leads to and replay starts from; if it is the target, no step is replayed."""
    reason: str
    sources: tuple[int, ...] = ()
    """(Begins.COPY) The ranks that have, or get to, `from_version`, nearest first; they share the transfer.
    (Begins.SNAPSHOT) The rank that keeps this rank's state; empty: the rank takes its own copy."""

    @property
    def policy(self) -> Policy:
        return TABLE[self.strategy]

    @property
    def loads(self) -> bool:
        """Returns whether it loads its checkpoint or a snapshot, so that later steps are recomputed or given up."""
        return self.policy.begins in (Begins.CHECKPOINT, Begins.SNAPSHOT)


Help = pb.Help
"""A replay that other ranks share: they compute some microbatches of every step."""
Prediction = pb.ReplayPrediction
"""The predicted time of one rank's replay, from the moment that it has its base state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How all ranks get to `target_version`."""

    target_version: int
    ranks: tuple[RankPlan, ...]
    """One for each rank, ascending by rank."""
    collective_source: int
    """The rank whose stream of collective results covers every replayed step; -1: none needed."""
    reason: str
    exact: bool = True
    """False: an undo that is not bit-exact is used, or the log does not lead to the target."""
    help: tuple[Help, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    """One for each replay whose costs are known."""

    @property
    def restores(self) -> bool:
        """Returns whether all ranks go back, to the checkpoint or to a snapshot, without reading the log."""
        return all(rank_plan.policy.goes_back for rank_plan in self.ranks)

    @property
    def gives_up_log(self) -> bool:
        """Returns whether the log's records are discarded, because log and checkpoints no longer lead to the job's
        state."""
        return self.restores or not (self.exact or self.reads_log)

    @property
    def costliest(self) -> Strategy:
        """Returns the strategy by which the recovery is counted: the costliest of its ranks'."""
        by_cost = list(TABLE)
        return max((r.strategy for r in self.ranks), key=by_cost.index)

    @property
    def reads_log(self) -> bool:
        """Returns whether some rank replays."""
        return bool(self.replayed_from)

    @property
    def replayed_from(self) -> Mapping[int, int]:
        """Returns the ranks that replay, each with the version from which it does."""
        return {r.rank: r.from_version for r in self.ranks if r.from_version < self.target_version}

    @property
    def log_readers(self) -> frozenset[int]:
        """Returns the ranks that read other ranks' streams in the log: they replay, or help with a replay."""
        helping = {rank for help in self.help for rank in (help.owner, *help.helpers)}
        return frozenset(helping.union(self.replayed_from))

    @property
    def copies(self) -> tuple[RankPlan, ...]:
        """Returns the plans of ranks that receive their state from another one, in the order in which all ranks take
        part."""
        copying = (r for r in self.ranks if r.policy.begins is Begins.COPY or r.sources)
        return tuple(sorted(copying, key=lambda r: r.rank))

    @property
    def collective_sources(self) -> tuple[int, ...]:
        """Returns the ranks that have done all steps below the target themselves, `collective_source` first: the result
        of a collective of a subset of ranks is in the logs of those alone. Empty: none is needed."""
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
        """Returns whether the rank replays, or would if its base were not the target already."""
        return rank in self.replayed_from or self.of(rank).policy.replays

    def was_logged(self, rank: int) -> bool:
        """Returns whether the rank's next steps, a replay or the step after the target, may be in its streams already:
        it goes on with a state that is not its own, from an earlier moment."""
        return self.of(rank).policy.begins is not Begins.OWN and self.redoes(rank)

    def help_of(self, rank: int) -> Help | None:
        """Returns the shared replay in which the rank takes part, as its owner or as a helper."""
        return next((help for help in self.help if rank in (help.owner, *help.helpers)), None)

    def predicted_s(self, rank: int) -> float | None:
        """Returns the predicted seconds of the rank's replay; None: unknown."""
        return next((prediction.seconds for prediction in self.predictions if prediction.rank == rank), None)
