"""plan(): from what every rank reports to how each gets to the agreed version.

1. The highest version that every stage group reaches without replay (swift.recovery.reach says how):

    KEEP, ROLL_FORWARD, UNDO, REPLICA   each to the target

2. If there is none, a replay. Target: the highest version that some rank reaches, for which the log has what
   the replays need. Each stage group gets to one base <= target, and if that is below, all of its ranks replay
   from there together, each with its own batches:

    the highest version <= target that the group reaches without replay, not older than the newest complete
    checkpoint c <= target: CATCH_UP for who holds it; ROLL_FORWARD, UNDO, REPLICA, each followed by replay
    else c: REPLAY on all of its ranks

   A lower target is tried only where no stage group would have to throw a newer whole state away for a replay:
   with one, everybody's checkpoint is as good.

   Recovery groups (swift.recovery.groups): nothing that passes inside of one is logged. So all stage groups of a
   recovery group go to one base, the highest version that all of them reach so, or c; those that hold a newer one
   give it up, as without the others' state it is of no use. One group of all stages is never replayed. Nor is
   anything where a slot is vacant: its batches were a part of the steps.

3. If that cannot be done either, everybody goes back (swift.recovery.going_back): SNAPSHOT where that is the job's
   strategy and one is whole, else CHECKPOINT, at the newest complete one.

An inexact undo is used only if the configuration allows it, and only if the same target cannot be reached without.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from swift.recovery.assignment import Assignment
from swift.recovery.cost import StageCost, costs_of
from swift.recovery.coverage import collective_source, uncovered
from swift.recovery.decision import Plan, RankPlan
from swift.recovery.going_back import go_back, sooner
from swift.recovery.helping import helps, words
from swift.recovery.measured import RankMeasured
from swift.recovery.prediction import Predictor, predicted_words
from swift.recovery.reach import Reach
from swift.recovery.refusals import Refusals
from swift.recovery.strategies import TABLE, Way, may_replay, permitted
from swift.recovery.types import Checkpoints, PlanConfig, Report, Strategy, StreamSummary

NAMED_MAX = 64
"""Ranks, or stages, that a reason names: every rank of a job is told it."""

Ways = Mapping[int, Way]
"""rank -> how it gets to the version from where it may have to replay."""


def plan(
    reports: Sequence[Report],
    assignment: Assignment,
    log_inventory: Mapping[str, StreamSummary],
    checkpoints: Checkpoints,
    config: PlanConfig,
    refused: Refusals = Refusals(),  # noqa: B008  (frozen)
    measured: Mapping[int, RankMeasured] = MappingProxyType({}),
) -> tuple[Plan | None, str]:
    """The plan and its reason; (None, reason) if there is no way back.

    `reports`: one for every slot that is held. `refused`: what is not to be planned again. `measured`: what each rank,
    or the process that held it before, has said of its steps; may lack any of them. ValueError: reports and assignment
    do not fit.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    if [report.rank for report in reports] != list(assignment.occupied):
        raise ValueError("plan needs one report of every slot that is held")
    if lost := assignment.lost_stages():
        return None, f"no rank is left that runs stage {lost[0]}"
    usable = permitted(config.strategy)
    # Where they are only one way among others, it is no news that there are none.
    snapshots = config.strategy == "snapshot" or any(report.snapshots for report in reports)
    snapshots = snapshots and Strategy.SNAPSHOT in usable.difference(refused.strategies)
    restore = partial(go_back, reports, checkpoints, snapshots=snapshots)
    if refused.everything:
        return restore(refused.reason)
    if usable == {Strategy.CHECKPOINT}:
        return restore("the job is configured to restore checkpoints")
    costs = costs_of(measured, config.groups)
    allowed = usable.difference(refused.strategies)
    situation = _Situation(reports, assignment, log_inventory, checkpoints, allowed, config, costs)
    reach = situation.reach(inexact=config.inexact_undo)
    if not reach.anywhere():
        return restore(_but(refused, "no rank holds a state"))
    if reach.everywhere():
        outcome = situation.without_replay(max(reach.everywhere()), reach)
        return outcome, outcome.reason
    if not config.groups.logs:
        why = f"nothing is logged within one recovery group ({config.groups}), and {situation.disagreement(reach)}"
        return restore(_but(refused, why))
    if refused.replays:
        return restore(refused.reason)
    if assignment.vacant:
        why = f"a step cannot be replayed without {_ranks(assignment.vacant)}, and {situation.disagreement(reach)}"
        return restore(_but(refused, why))
    if not may_replay(config.strategy):
        why = f"the job is configured never to replay, and {situation.disagreement(reach)}"
        return restore(_but(refused, why))
    at_most = 0 if refused.help else config.helpers
    chosen, reason = situation.with_replay(reach, inexact=config.inexact_undo, helpers=at_most)
    if chosen is None:
        return restore(_but(refused, reason))
    if snapshots and (why := sooner(reports, chosen, measured)):
        return restore(_but(refused, why))
    return chosen, reason


class _Situation:
    """What plan() was asked, and the two kinds of plan for it."""

    def __init__(
        self,
        reports: Sequence[Report],
        assignment: Assignment,
        log: Mapping[str, StreamSummary],
        checkpoints: Checkpoints,
        allowed: Iterable[Strategy],
        config: PlanConfig,
        costs: Mapping[int, StageCost],
    ) -> None:
        self._costs = costs
        self._reports = {report.rank: report for report in reports}
        self._assignment = assignment
        self._log = log
        self._checkpoints = checkpoints
        self._recovery_groups, self._since = config.groups, config.groups_since
        self._together = config.groups.together(assignment.groups(), assignment.stages)
        self._allowed = frozenset(allowed)
        # With one rank to a stage that holds a version or holds none, there is nothing to say about choices.
        self._has_choice = assignment.dp_size > 1 or any(
            (r.undo_to, r.forward_to, r.finish_to) != (None, None, None) for r in reports
        )

    def reach(self, *, inexact: bool) -> Reach:
        return Reach(self._reports.values(), self._assignment, self._allowed, inexact=inexact)

    def without_replay(self, target: int, reach: Reach) -> Plan:
        """`target` is reached everywhere."""
        bases = {group: reach.ways(group, target) for group in self._groups}
        ranks = self._ranks(bases, target)
        why = f"the highest version that every stage reaches without replay ({self._reached(reach)})"
        return self._made(ranks, bases, target, -1, why if self._has_choice else "")

    def with_replay(self, reach: Reach, *, inexact: bool, helpers: int = 0) -> tuple[Plan | None, str]:
        """The highest target that can be had, exactly if that can be; None and why not even the highest can.

        `helpers`: so many ranks, at most, may share each replay.
        """
        problem = ""
        for target in sorted(reach.anywhere(), reverse=True):
            for allowed in (False, True) if inexact else (False,):
                replayed, why = self._replay_to(target, self.reach(inexact=allowed), problem)
                if replayed is not None:
                    replayed = self._helped(replayed, helpers)
                    return replayed, replayed.reason
                problem = problem or why
        return None, problem

    def _helped(self, alone: Plan, at_most: int) -> Plan:
        ranks, target, reports = alone.ranks, alone.target_version, self._reports.values()
        predictor = Predictor(ranks, target, self._assignment, self._costs)
        groups = self._recovery_groups
        sharing = helps(ranks, target, self._assignment, reports, at_most, groups, predictor)
        possible = {help.owner for help in helps(ranks, target, self._assignment, reports, at_most, groups)}
        helped = replace(alone, help=sharing, predictions=predictor.of(sharing))
        reasons = [alone.reason, *words(sharing), *predicted_words(helped, possible)]
        return replace(helped, reason="; ".join(reasons))

    def disagreement(self, reach: Reach) -> str:
        return f"no version is reached by every stage without replay ({self._reached(reach)})"

    # --- ---

    @property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        return self._assignment.groups()

    def _replay_to(self, target: int, reach: Reach, higher: str) -> tuple[Plan | None, str]:
        """`higher`: why a higher target was given up; "": there was none."""
        since = self._since
        checkpoint = self._checkpoints.newest_at_most(target)
        if checkpoint is not None and checkpoint < since:
            checkpoint = None
        bases: dict[tuple[int, ...], Ways] = {}
        lacking: list[int] = []
        for members in self._together:
            reached = frozenset.intersection(*(reach.of_group(group) for group in members))
            newest = max((version for version in reached if version <= target), default=None)
            if reached and newest is None:
                name = self._name(members)
                return None, f"{name} holds a version above {target}, and nothing takes it back"
            if newest is not None and newest >= (since if checkpoint is None else checkpoint):
                bases |= {group: reach.ways(group, newest) for group in members}
            elif checkpoint is not None:
                ways = self._from_checkpoint(members, checkpoint, older=newest)
                bases |= dict.fromkeys(members, ways)
            else:
                ranks_of = [rank for group in members for rank in group]
                lacking += [rank for rank in ranks_of if not reach.of_rank(rank)] or ranks_of
        if lacking:
            who = f"rank {_listed(sorted(lacking))}"
            if since:
                groups = f"recovery groups are {self._recovery_groups} since version {since}"
                return None, f"{groups}, and no complete checkpoint from there to {target} is there for {who}"
            return (
                None,
                f"no complete checkpoint at version {target} or before for {who}, which holds no state",
            )
        ranks = self._ranks(bases, target)
        problem = uncovered(ranks, target, self._assignment, self._log)
        if problem:
            return None, problem
        source, problem = collective_source(ranks, target, self._reports.values(), self._log)
        if problem:
            return None, problem
        why = self.disagreement(reach)
        if higher:
            why += f", and none above {target} can be replayed: {higher}"
        return self._made(ranks, bases, target, source, why if self._has_choice else ""), ""

    def _made(
        self,
        ranks: tuple[RankPlan, ...],
        bases: Mapping[tuple[int, ...], Ways],
        target: int,
        source: int,
        why: str,
    ) -> Plan:
        inexact = {rank: way for ways in bases.values() for rank, way in ways.items() if not way.exact}
        reason = _summary(ranks, target) + (f"; {why}" if why else "")
        if inexact:
            reason += f"; not bit for bit: {_inexact_words(inexact)}"
        return Plan(
            target_version=target,
            ranks=ranks,
            collective_source=source,
            reason=reason,
            exact=not inexact,
            groups=str(self._recovery_groups),
        )

    def _ranks(self, bases: Mapping[tuple[int, ...], Ways], target: int) -> tuple[RankPlan, ...]:
        plans = [self._rank_plan(rank, ways, target) for group, ways in bases.items() for rank in group]
        return tuple(sorted(plans, key=lambda rank_plan: rank_plan.rank))

    def _rank_plan(self, rank: int, ways: Ways, target: int) -> RankPlan:
        way = ways[rank]
        behind = target - way.version
        policy = way.by.behind if behind else way.by
        reason = policy.reason(self._reports[rank], ways, target)
        if behind and not policy.replays:
            reason += f"; {behind} to replay"
        return RankPlan(
            rank=rank,
            strategy=policy.strategy,
            from_version=way.version,
            reason=reason,
            sources=way.sources,
        )

    def _from_checkpoint(self, members: Sequence[tuple[int, ...]], version: int, older: int | None) -> Ways:
        """For stage groups that go back to it together. `older`: the version that they reach, before the checkpoint."""
        return {
            rank: Way(
                by=TABLE[Strategy.REPLAY],
                version=version,
                note=self._why_not_held(self._reports[rank], members, older),
            )
            for group in members
            for rank in group
        }

    def _why_not_held(self, report: Report, members: Sequence[tuple[int, ...]], older: int | None) -> str:
        if older is not None:
            return ", older than the checkpoint" if older == report.version else ""
        if report.newest is None:
            return ""
        return f", but the ranks of {self._name(members)} reach no version together"

    def _reached(self, reach: Reach) -> str:
        named = [
            f"{self._name([group])}: {_listed(sorted(reach.of_group(group), reverse=True)) or 'none'}"
            for group in self._groups[:NAMED_MAX]
        ]
        more = len(self._groups) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")

    def _name(self, members: Sequence[tuple[int, ...]]) -> str:
        """Of stage groups that recover together, or of one."""
        stages = sorted(stage for group in members for stage in self._assignment.stages[group[0]])
        if not stages:
            return _ranks(members[0])
        return f"{'stage' if len(stages) == 1 else 'stages'} {_listed(stages)}"


def _but(refused: Refusals, why: str) -> str:
    return f"{refused.reason}; {why}" if refused.reason else why


def _inexact_words(ways: Ways) -> str:
    by_strategy: dict[Strategy, list[int]] = {}
    for rank, way in ways.items():
        by_strategy.setdefault(way.by.strategy, []).append(rank)
    return ", ".join(f"{TABLE[strategy].noun} of {_ranks(ranks)}" for strategy, ranks in by_strategy.items())


def _summary(ranks: Sequence[RankPlan], target: int) -> str:
    parts = []
    for strategy in Strategy:
        chosen = [r.rank for r in ranks if r.strategy is strategy]
        if chosen:
            parts.append(f"{strategy} on {_ranks(chosen)}")
    return f"target version {target}: {'; '.join(parts)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks)}"


def _listed(numbers: Sequence[int]) -> str:
    more = len(numbers) - NAMED_MAX
    return ", ".join(map(str, numbers[:NAMED_MAX])) + (f" and {more} more" if more > 0 else "")
