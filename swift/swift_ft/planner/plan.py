"""plan(): from the reports of all ranks to how each rank gets to the agreed version.

1. The highest version that every stage group reaches without replay (`Reach`):

    KEEP, ROLL_FORWARD, UNDO, REPLICA   each to the target

2. If there is none, a replay. Target: the highest version that some rank reaches and for which the log has the
   inputs of all replays. Each stage group gets to one base <= target. If the base is below the target, all of its
   ranks replay from there together, each with its own batches:

    the highest version <= target that the group reaches without replay, not older than the newest complete
    checkpoint c <= target: CATCH_UP for ranks that hold it; ROLL_FORWARD, UNDO, REPLICA, each followed by replay
    else c: REPLAY on all of its ranks

   A lower target is used only if no stage group would have to discard a newer complete state for it: otherwise
   restoring the checkpoint everywhere is as good.

   Recovery groups (swift_ft.planner.groups): transfers inside of one are not logged. So all stage groups of a
   recovery group go to one base, the highest version that all of them reach this way, or c; those that hold a newer
   one give it up, because it is useless without the others' state. One group of all stages is never replayed.
   Nor is any step replayed while a slot is vacant: its batches were a part of the steps.

3. If that is impossible too, all ranks go back (`go_back`): SNAPSHOT where the job's strategy permits it and a
   version has a copy of every rank's state, else CHECKPOINT, at the newest complete one.

An inexact undo is used only if the configuration allows it, and only if the same target cannot be reached without.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log import record
from swift_ft.planner.assignment import Assignment
from swift_ft.planner.decision import Help, Plan, RankPlan
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.replay_cost import Predictor, StageCost, costs_of, predicted_words
from swift_ft.planner.settings import PlanConfig
from swift_ft.planner.strategies import TABLE, Begins, Way, may_replay, replaying
from swift_ft.planner.types import Report, Strategy, StreamSummary
from swift_ft.text import listed

# Selection of the steps under way that may be finished.


def finishable(reports: Sequence[Report]) -> list[Report]:
    """Returns the reports without `forward_to` where the step is to be redone rather than finished.

    A rank in its vote has all gradients of the step, and could finish it. But a rank that died may have got less far,
    and not have done its work before the vote: its line of the step (`session.log`). A rank that copies the finished
    step never does that work. So where lines are written, a step is finished only if some rank has completed the vote,
    so that all had voted, and by a rank that cannot revert it. A rank that can revert the next step has completed its
    vote too.
    """
    held = max(
        (v for report in reports for v in (report.version, report.undo_to) if v is not None), default=-1
    )
    return [replace(report, forward_to=None) if _waits(report, held) else report for report in reports]


def _waits(report: Report, held: int) -> bool:
    takes_back = report.version is not None or (report.undo_to is not None and report.undo_exact)
    return report.forward_by_all and takes_back and report.forward_to is not None and report.forward_to > held


# Can the log feed the replays of a plan?
#
# Replaying stage k for data-parallel rank d over the steps [a, t) reads `s{k-1}.F` and `s{k+1}.B` of that rank
# (swift_ft.log.record has the names), and compares its sends with its own F and B. A neighbour that replays from b
# regenerates its stream from step b, so the log needs only [a, b); a neighbour that does not replay must have logged
# all of [a, t). External inputs (X, T) are loaded again by the trainer's own loader where the log has a hole, so they
# only must not be corrupt. No stream that is read or written may have a step in [a, t) that was declared unlogged
# (swift_ft.log.record): missing records are never guessed, nor filled in after later ones. The stages of a recovery
# group (swift_ft.planner.groups) replay from one version, so the transfers between them, which are not logged, need no
# check here. Collective results come from one rank that has done all the steps before t.
#
# Summaries do not show whether each single record exists; a rank that finds one missing refuses.


def uncovered(
    ranks: Iterable[RankPlan], target: int, assignment: Assignment, log: Mapping[str, StreamSummary]
) -> str:
    """Returns why the log cannot feed the replays; "" if it can."""
    by_rank = {rank_plan.rank: rank_plan for rank_plan in ranks}
    for reader in by_rank.values():
        if reader.from_version == target:
            continue
        dp_rank, dp_size = assignment.slots[reader.rank].dp_rank, assignment.dp_size
        for stage in assignment.stages[reader.rank]:
            for kind in record.KINDS:
                own = log.get(record.boundary(stage, kind, dp_rank, dp_size))
                if own is not None and own.corrupt:
                    return _corrupt(own)
                problem = "" if own is None else _unlogged(own, reader.from_version, target - 1)
                if problem:
                    return f"rank {reader.rank} cannot replay stage {stage}: {problem}"
            for neighbour, kind in ((stage - 1, "F"), (stage + 1, "B")):
                if not 0 <= neighbour < assignment.num_stages:
                    continue
                writer = by_rank[assignment.slot_at(neighbour, dp_rank)]
                stream = record.boundary(neighbour, kind, dp_rank, dp_size)
                problem = _input_unusable(reader, writer, stream, target, log)
                if problem:
                    return f"rank {reader.rank} cannot replay stage {stage}: {problem}"
    return ""


def _input_unusable(
    reader: RankPlan, writer: RankPlan, stream: str, target: int, log: Mapping[str, StreamSummary]
) -> str:
    summary = log.get(stream) or StreamSummary(stream=stream, records=0)
    if summary.corrupt:
        return _corrupt(summary)
    first = reader.from_version
    # The log alone must have the steps up to here; later ones are regenerated by the writer (which may be the reader
    # itself: stages of one rank pass tensors inside it, and restart together).
    until = min(target, writer.from_version)
    if until <= first:
        return ""
    return _lacks(summary, first, until - 1)


def _lacks(summary: StreamSummary, first: int, last: int) -> str:
    """Returns which of the steps `first` to `last` the stream lacks; "" if it spans them."""
    if problem := _unlogged(summary, first, last):
        return problem
    if summary.trimmed_below_step > first:
        return (
            f"{summary.stream} is trimmed below step {summary.trimmed_below_step}, and step {first} is needed"
        )
    if summary.records == 0:
        return f"{summary.stream} is empty, and step {first} is needed{_why(summary)}"
    if summary.first_step > first:
        return (
            f"{summary.stream} begins at step {summary.first_step}, and step {first} is needed{_why(summary)}"
        )
    if summary.last_step < last:
        return f"{summary.stream} ends at step {summary.last_step}, and step {last} is needed"
    return ""


def _unlogged(summary: StreamSummary, first: int, last: int) -> str:
    """Returns which of the steps `first` to `last` are declared incomplete."""
    if summary.unlogged is None or summary.unlogged.first > last or summary.unlogged.last < first:
        return ""
    return (
        f"records of {summary.stream} in {summary.unlogged} are declared unlogged: dropped, as the log could not keep "
        "up, or lost with a process that a replica has replaced"
    )


def collective_source(
    ranks: Sequence[RankPlan], target: int, reports: Iterable[Report], log: Mapping[str, StreamSummary]
) -> tuple[int, str]:
    """Returns (rank, ""), or (-1, reason), where the reason is "" if no source is needed, else why no rank will do.

    Any rank that has done the steps before `target` itself may be the source, since results are equal on all. Ranks
    that keep their state are preferred. (If a stage is rebuilt from the checkpoint although one of its ranks holds the
    target, because another one does not, there may be no rank that keeps its state.)
    """
    starts = [r.from_version for r in ranks if r.from_version < target]
    logged = {r.rank: log.get(record.collectives(r.rank)) for r in ranks}
    # A stream without records may still be declared unlogged, by a process that cannot know that it has none.
    if not starts or not any(summary and summary.records > summary.marks for summary in logged.values()):
        return -1, ""
    by_rank = {report.rank: report for report in reports}
    keeps = {r.rank for r in ranks if r.policy.rests}
    why = []
    for rank, summary in sorted(
        logged.items(), key=lambda item: (item[0] not in keeps, by_rank[item[0]].since_generation, item[0])
    ):
        newest = by_rank[rank].newest
        if newest is None or newest < target or summary is None:
            continue
        problem = _corrupt(summary) if summary.corrupt else _lacks(summary, min(starts), target - 1)
        if not problem:
            return rank, ""
        why.append(problem)
    wanted = f"no survivor's log has the collective results of steps {min(starts)} to {target - 1}"
    return -1, f"{wanted} ({'; '.join(why) or 'none was logged'})"


def _corrupt(summary: StreamSummary) -> str:
    return f"{summary.stream} is corrupt{_why(summary)}"


def _why(summary: StreamSummary) -> str:
    return f" ({summary.reason})" if summary.reason else ""


# Versions that ranks reach without replay, and how.
#
# A rank reaches by itself the versions that its strategies lead to: the one it holds, the one that finishing its step
# leads to, the one that reverting it leads to. A shard of a stage group reaches the versions that one of its replicas
# reaches: the others copy it. A stage group reaches the versions that all of its shards reach.
#
# Among the ways to one version, a rank's own is preferred to a copy if it is bit-exact (`Replica` in
# `swift_ft.planner.strategies`). Its own are tried in the order of the table.


class Reach:
    """Versions reached by the `allowed` strategies; by inexact ones only if `inexact`."""

    def __init__(
        self,
        reports: Iterable[Report],
        assignment: Assignment,
        allowed: Iterable[Strategy] = TABLE,
        *,
        inexact: bool = False,
    ) -> None:
        self._reports = {report.rank: report for report in reports}
        self._assignment = assignment
        policies = [TABLE[strategy] for strategy in TABLE if strategy in frozenset(allowed)]
        self._own_policies = [policy for policy in policies if policy.begins is Begins.OWN]
        self._copies = next((policy for policy in policies if policy.begins is Begins.COPY), None)
        self._inexact = inexact
        self._own = {rank: self._own_ways(report) for rank, report in self._reports.items()}
        for group in assignment.groups():
            self._leave_out_alone(group)
        self._groups = {group: self._of_group(group) for group in assignment.groups()}

    def anywhere(self) -> frozenset[int]:
        """Returns the versions that some rank reaches by itself."""
        return frozenset(version for rank in self._reports for version in self.of_rank(rank))

    def everywhere(self) -> frozenset[int]:
        """Returns the versions that every stage group reaches."""
        return frozenset.intersection(*self._groups.values())

    def of_rank(self, rank: int) -> frozenset[int]:
        return frozenset(self._own[rank])

    def of_group(self, group: tuple[int, ...]) -> frozenset[int]:
        return self._groups[group]

    def ways(self, group: tuple[int, ...], version: int) -> Mapping[int, Way]:
        """Returns how each rank of `group` gets to `version`, one of `of_group(group)`."""
        assert version in self._groups[group]
        ways: dict[int, Way] = {}
        for replicas in self._shards(group):
            ways |= self._shard_ways(replicas, version)
        return ways

    # --- ---

    def _of_group(self, group: tuple[int, ...]) -> frozenset[int]:
        return frozenset.intersection(*(self._of_shard(replicas) for replicas in self._shards(group)))

    def _of_shard(self, replicas: Sequence[int]) -> frozenset[int]:
        versions = frozenset(version for rank in replicas for version in self.of_rank(rank))
        if self._copies is not None:
            return versions
        return frozenset(version for version in versions if self._each_reaches(replicas, version))

    def _each_reaches(self, replicas: Sequence[int], version: int) -> bool:
        ways = [self._own[rank].get(version) for rank in replicas]
        return all(way and (way.exact or len(replicas) == 1) for way in ways)

    def _shard_ways(self, replicas: Sequence[int], version: int) -> Mapping[int, Way]:
        own = {rank: way for rank in replicas if (way := self._own[rank].get(version))}
        return own if self._copies is None else self._copies.share(own, replicas, self._distance)

    def _own_ways(self, report: Report) -> dict[int, Way]:
        """Returns version -> how the rank gets there by itself, by the first of several ways."""
        ways: dict[int, Way] = {}
        for policy in self._own_policies:
            way = policy.reach(report)
            if way is not None and (way.exact or self._inexact):
                ways.setdefault(way.version, way)
        return ways

    def _leave_out_alone(self, group: tuple[int, ...]) -> None:
        """Removes ways that finish a step together unless every rank of the group can finish that step."""
        for version in {version for rank in group for version in self._own[rank]}:
            ways = {rank: self._own[rank].get(version) for rank in group}
            if all(way is not None and way.by.finishes_step for way in ways.values()):
                continue
            for rank, way in ways.items():
                if way is not None and way.by.together:
                    del self._own[rank][version]

    def _shards(self, group: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the replicas of each shard, ascending."""
        by_shard: dict[int, list[int]] = {}
        for rank in group:
            by_shard.setdefault(self._assignment.slots[rank].shard, []).append(rank)
        return [tuple(replicas) for _, replicas in sorted(by_shard.items())]

    def _distance(self, rank: int, source: int) -> tuple[bool, int, int]:
        """Sort key of copy sources: ranks on the same host first, then by distance in rank. An unknown host counts as
        another."""
        mine, theirs = self._reports[rank].host, self._reports[source].host
        return not mine or mine != theirs, abs(rank - source), source


# All ranks go back to an older version: to the newest snapshot of which every rank's state is left, or to a checkpoint.
#
# A snapshot version is complete if of every rank's state some rank has a copy: the rank itself, or another one that
# keeps it. All copies of one version are from the same step, so any of them serves. If the newest complete checkpoint
# is newer, the checkpoint is used.


def go_back(
    reports: Sequence[Report], checkpoints: Sequence[int], why: str, *, snapshots: bool
) -> tuple[Plan | None, str]:
    """Plans the return of all ranks. `why`: the reason that no newer version will do. `snapshots`: they may be used.
    Returns (None, reason) if there is neither a snapshot nor a checkpoint."""
    if not snapshots:
        return _to_checkpoint(reports, checkpoints, why)
    copies = _copies(reports)
    whole = _whole(reports, copies)
    if not whole:
        return _to_checkpoint(reports, checkpoints, _and(why, _lacking(reports, copies)))
    version = max(whole)
    if max(checkpoints, default=version) > version:
        older = f"the newest whole snapshot is of version {version}"
        return _to_checkpoint(reports, checkpoints, _and(why, older))
    held = copies[version]
    ranks = tuple(
        RankPlan(
            rank=r.rank,
            strategy=Strategy.SNAPSHOT,
            from_version=version,
            reason=why,
            sources=() if r.rank in held[r.rank] else (_nearest(r, held[r.rank], reports),),
        )
        for r in reports
    )
    reason = f"every rank goes back to its snapshot of version {version}: {why}"
    return Plan(target_version=version, ranks=ranks, collective_source=-1, reason=reason), reason


def sooner(reports: Sequence[Report], replayed: Plan, measured: Mapping[int, pb.RankMeasured]) -> str:
    """Returns why to go back to the newest complete snapshot rather than to replay: redoing the steps since takes less
    time, by measured step times. Empty: it does not, or the times are unknown."""
    versions = _whole(reports, _copies(reports))
    behind = [rank.rank for rank in replayed.ranks if rank.from_version < replayed.target_version]
    predicted = {prediction.rank: prediction.seconds for prediction in replayed.predictions}
    steps_s = [measured[report.rank].step_s for report in reports if report.rank in measured]
    if not versions or not steps_s or not predicted.keys() >= set(behind):
        return ""
    again = replayed.target_version - max(versions)
    again_s, replay_s = again * max(steps_s), max(predicted.values(), default=0.0)
    if again < 0 or again_s >= replay_s:
        return ""
    steps = f"{again} step{'' if again == 1 else 's'}"
    return f"{steps} again take {again_s:.3g} s, and a replay {replay_s:.3g} s"


def _whole(reports: Sequence[Report], copies: Mapping[int, Mapping[int, object]]) -> list[int]:
    """Returns the versions with a copy of every rank's state."""
    return [version for version, held in copies.items() if all(r.rank in held for r in reports)]


def _to_checkpoint(
    reports: Sequence[Report], checkpoints: Sequence[int], why: str
) -> tuple[Plan | None, str]:
    version = max(checkpoints, default=None)
    if version is None:
        return None, f"{why}; there is no complete checkpoint to go back to"
    ranks = tuple(
        RankPlan(rank=r.rank, strategy=Strategy.CHECKPOINT, from_version=version, reason=why) for r in reports
    )
    reason = f"every rank restores the checkpoint of version {version}: {why}"
    return Plan(target_version=version, ranks=ranks, collective_source=-1, reason=reason), reason


def _and(why: str, more: str) -> str:
    """Appends `more` once, even if planning runs several times in one recovery."""
    return why if more in why else f"{why}; {more}"


def _copies(reports: Sequence[Report]) -> dict[int, dict[int, list[int]]]:
    """Returns version -> rank -> the ranks that hold a copy of its state."""
    copies: dict[int, dict[int, list[int]]] = {}
    for report in reports:
        for held in report.snapshots:
            copies.setdefault(held.version, {}).setdefault(held.rank, []).append(report.rank)
    return copies


def _nearest(report: Report, holders: Sequence[int], reports: Sequence[Report]) -> int:
    """Returns the holder of a copy to use: one on the rank's own host, if hosts are known and one is there."""
    host_of = {other.rank: other.host for other in reports}
    return min(holders, key=lambda rank: (not report.host or host_of[rank] != report.host, rank))


def _lacking(reports: Sequence[Report], copies: Mapping[int, Mapping[int, object]]) -> str:
    held = {rank for of_ranks in copies.values() for rank in of_ranks}
    lost = [r.rank for r in reports if r.rank not in held]
    if not lost:
        return "no version of the snapshots is left of all ranks"
    return f"no snapshot of {_ranks(lost)} is left"


# Selection of the ranks that help a replay: those that would only wait for it.
#
# A helper computes some of the microbatches of every step that it helps with. Its inputs must be in the log already,
# and its outputs must have been delivered before. So a replay is shared only up to the version from which a
# neighbouring stage is recomputed as well; the owner alone replays the rest, where the two feed each other.
#
# Only a rank that is a recovery group by itself is helped: what passes inside a group of several is in no log.
#
# The number of helpers depends on the costs of the replay (`swift_ft.planner.replay_cost`); if these are unknown, it is
# the most that is allowed.

STEPS_MIN = 2
"""Fewest steps for which a stage is built again on a helper."""


def helps(
    ranks: Sequence[RankPlan],
    target: int,
    assignment: Assignment,
    reports: Iterable[Report],
    at_most: int,
    groups: RecoveryGroups = RecoveryGroups(),  # noqa: B008  (frozen)
    predictor: Predictor | None = None,
) -> tuple[Help, ...]:
    """Assigns helpers: at most `at_most` to each rank that replays, the nearest first; a rank helps one replay only.
    Assigns fewer if the `predictor` expects no gain from more."""
    by_rank = {rank_plan.rank: rank_plan for rank_plan in ranks}
    if at_most < 1 or assignment.dp_size > 1:
        return ()
    alone = [m[0][0] for m in groups.together(assignment.groups(), assignment.stages) if len(m) == 1]
    spans = {
        owner: until
        for owner in alone
        if by_rank[owner].policy.replays
        and (until := _until(owner, target, assignment, by_rank)) - by_rank[owner].from_version >= STEPS_MIN
    }
    free = [r.rank for r in reports if r.can_help and by_rank[r.rank].policy.rests]
    wanted = predictor.wanted(spans, at_most, len(free)) if predictor is not None else {}
    chosen: dict[int, list[int]] = {owner: [] for owner in spans}
    for _ in range(at_most):  # in turns: all ranks wait for the slowest replay
        for owner, helpers in chosen.items():
            if free and len(helpers) < wanted.get(owner, at_most):
                helpers.append(min(free, key=lambda rank: (abs(rank - owner), rank)))
                free.remove(helpers[-1])
    return tuple(
        Help(owner=owner, helpers=helpers, until=spans[owner]) for owner, helpers in chosen.items() if helpers
    )


def words(sharing: Sequence[Help]) -> list[str]:
    """Describes each helped replay in words: its helpers, and the last version."""
    return [
        f"{_ranks(help.helpers)} to help rank {help.owner} up to version {help.until}" for help in sharing
    ]


def _until(owner: int, target: int, assignment: Assignment, by_rank: Mapping[int, RankPlan]) -> int:
    own = set(assignment.stages[owner])
    beside = {
        other for stage in own for other in (stage - 1, stage + 1) if 0 <= other < assignment.num_stages
    }
    neighbours = {rank for stage in beside - own for rank in assignment.holders(stage)}
    return min([target, *(by_rank[rank].from_version for rank in neighbours)])


# Refusals of ranks, which exclude a strategy from further plans.


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusals:
    """The strategies that ranks refused in this recovery; none is planned again before the job runs."""

    strategies: tuple[Strategy, ...] = ()
    """In the order of Strategy. If KEEP is among them, only a snapshot or a checkpoint remains."""
    reason: str = ""
    """The reason of the latest refusal, in words."""
    help: bool = False
    """A replay with helpers failed: each owner replays alone."""

    @property
    def replays(self) -> bool:
        """Returns whether replay was refused."""
        return not replaying().isdisjoint(self.strategies)

    @property
    def everything(self) -> bool:
        return Strategy.KEEP in self.strategies

    def and_of(self, strategies: Iterable[Strategy], reason: str) -> "Refusals":
        """Returns these refusals with `strategies` added, for `reason`. CHECKPOINT is never added: the planner must
        instead know which checkpoint cannot be loaded."""
        union = {*self.strategies, *strategies} - {Strategy.CHECKPOINT}
        ordered = tuple(s for s in Strategy if s in union)
        return Refusals(strategies=ordered, reason=reason, help=self.help)

    def and_everything(self, reason: str) -> "Refusals":
        return self.and_of((s for s in Strategy if not TABLE[s].goes_back), reason)

    def and_help(self, reason: str) -> "Refusals":
        return replace(self, help=True, reason=reason)


NAMED_MAX = 64
"""Limit of ranks, or stages, named in a reason, which is sent to every rank of a job."""

Ways = Mapping[int, Way]
"""rank -> how it gets to the version from which it may have to replay."""


def plan(
    reports: Sequence[Report],
    assignment: Assignment,
    log_inventory: Mapping[str, StreamSummary],
    checkpoints: Sequence[int],
    config: PlanConfig,
    refused: Refusals = Refusals(),
    measured: Mapping[int, pb.RankMeasured] = MappingProxyType({}),
) -> tuple[Plan | None, str]:
    """Returns the plan and its reason; (None, reason) if recovery is impossible.

    `reports`: one for every held slot. `checkpoints`: the versions of which the shard of every held slot is durable.
    `refused`: strategies that are not planned again. `measured`: the latest measurements of each rank, or of the
    process that held it before; may lack any rank. Raises ValueError if reports and assignment do not fit.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    if [report.rank for report in reports] != list(assignment.occupied):
        raise ValueError("plan needs one report of every slot that is held")
    if lost := assignment.lost_stages():
        return None, f"no rank is left that runs stage {lost[0]}"
    usable = config.setting.permits
    # Where snapshots are only one way among others, their absence is not worth a reason.
    snapshots = bool(config.setting.snapshot_every) or any(report.snapshots for report in reports)
    snapshots = snapshots and Strategy.SNAPSHOT in usable.difference(refused.strategies)
    restore = partial(go_back, reports, checkpoints, snapshots=snapshots)
    if refused.everything:
        return restore(refused.reason)
    if config.setting.only_restores:
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
    def __init__(
        self,
        reports: Sequence[Report],
        assignment: Assignment,
        log: Mapping[str, StreamSummary],
        checkpoints: Sequence[int],
        allowed: Iterable[Strategy],
        config: PlanConfig,
        costs: Mapping[int, StageCost],
    ) -> None:
        self._costs = costs
        self._reports = {report.rank: report for report in reports}
        self._assignment = assignment
        self._log = log
        self._checkpoints = checkpoints
        self._recovery_groups = config.groups
        self._together = config.groups.together(assignment.groups(), assignment.stages)
        self._allowed = frozenset(allowed)
        # With one rank for each stage that holds a version or none, there is no choice to explain.
        self._has_choice = assignment.dp_size > 1 or any(
            (r.undo_to, r.forward_to, r.finish_to) != (None, None, None) for r in reports
        )

    def reach(self, *, inexact: bool) -> Reach:
        return Reach(self._reports.values(), self._assignment, self._allowed, inexact=inexact)

    def without_replay(self, target: int, reach: Reach) -> Plan:
        """Returns the plan to `target`, which every stage group reaches."""
        bases = {group: reach.ways(group, target) for group in self._groups}
        ranks = self._ranks(bases, target)
        why = f"the highest version that every stage reaches without replay ({self._reached(reach)})"
        return self._made(ranks, bases, target, -1, why if self._has_choice else "")

    def with_replay(self, reach: Reach, *, inexact: bool, helpers: int = 0) -> tuple[Plan | None, str]:
        """Returns the plan to the highest possible target, exact if possible; else None and why the highest target
        failed.

        `helpers`: the most ranks that may share each replay.
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
        helped = replace(alone, help=sharing, predictions=predictor.of(sharing))
        reasons = [alone.reason, *words(sharing), *predicted_words(helped)]
        return replace(helped, reason="; ".join(reasons))

    def disagreement(self, reach: Reach) -> str:
        return f"no version is reached by every stage without replay ({self._reached(reach)})"

    # --- ---

    @property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        return self._assignment.groups()

    def _replay_to(self, target: int, reach: Reach, higher: str) -> tuple[Plan | None, str]:
        """Returns a plan with replay to `target`. `higher`: why a higher target was given up; "" if there was none."""
        checkpoint = max((c for c in self._checkpoints if c <= target), default=None)
        bases: dict[tuple[int, ...], Ways] = {}
        lacking: list[int] = []
        for members in self._together:
            reached = frozenset.intersection(*(reach.of_group(group) for group in members))
            newest = max((version for version in reached if version <= target), default=None)
            if reached and newest is None:
                name = self._name(members)
                return None, f"{name} holds a version above {target}, and nothing takes it back"
            if newest is not None and newest >= (checkpoint or 0):
                bases |= {group: reach.ways(group, newest) for group in members}
            elif checkpoint is not None:
                ways = self._from_checkpoint(members, checkpoint, older=newest)
                bases |= dict.fromkeys(members, ways)
            else:
                ranks_of = [rank for group in members for rank in group]
                lacking += [rank for rank in ranks_of if not reach.of_rank(rank)] or ranks_of
        if lacking:
            who = f"rank {listed(sorted(lacking), NAMED_MAX)}"
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
        """Returns ways for stage groups that go back to the checkpoint together. `older`: the version before it that
        they reach."""
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
            f"{self._name([group])}: {listed(sorted(reach.of_group(group), reverse=True), NAMED_MAX) or 'none'}"
            for group in self._groups[:NAMED_MAX]
        ]
        more = len(self._groups) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")

    def _name(self, members: Sequence[tuple[int, ...]]) -> str:
        stages = sorted(stage for group in members for stage in self._assignment.stages[group[0]])
        if not stages:
            return _ranks(members[0])
        return f"{'stage' if len(stages) == 1 else 'stages'} {listed(stages, NAMED_MAX)}"


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
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, NAMED_MAX)}"


def without_log(
    planned: Callable[[Refusals], tuple[Plan | None, str]], refused: Refusals
) -> tuple[Plan | None, str]:
    """Plans as `plan` where the log is given up in any case, so that no plan may read it. `planned`: `plan` of these
    refusals."""
    found, reason = planned(refused)
    if found is not None and found.reads_log:
        found, reason = planned(
            refused.and_everything("the log has ended, and there is more to replay than a checkpoint")
        )
    if found is None or found.restores:
        return found, reason
    reason += f"; the log does not lead to version {found.target_version}, and begins anew"
    return replace(found, exact=False, reason=reason), reason
