"""Which ranks help a replay: those that would only wait for it.

A helper computes some of the microbatches of every step that it helps with. What it reads must be in the log already,
and what is sent must have arrived where it is needed: so a replay is shared up to the version from which on a stage
beside it is computed again as well, and the rest, where the two feed each other, is its owner's alone.

A recovery group of w stages is helped by whole copies of w ranks, one for each of its stages: what passes inside the
group is in no log, so who computes a microbatch of one stage needs somebody who computes it of the next.

How many help is a matter of what the replay costs (`swift.recovery.cost`); where that is not known, as many as may.
"""

from collections.abc import Iterable, Mapping, Sequence

from swift.recovery.assignment import Assignment
from swift.recovery.decision import Help, RankPlan
from swift.recovery.groups import RecoveryGroups
from swift.recovery.prediction import Predictor
from swift.recovery.types import Report

STEPS_MIN = 2
"""For fewer steps a stage is not built again elsewhere."""


def helps(
    ranks: Sequence[RankPlan],
    target: int,
    assignment: Assignment,
    reports: Iterable[Report],
    at_most: int,
    groups: RecoveryGroups = RecoveryGroups(),  # noqa: B008  (frozen)
    predictor: Predictor | None = None,
) -> tuple[Help, ...]:
    """At most `at_most` copies for each group that replays, the nearest ranks first; a rank helps one replay only.
    Fewer if the `predictor` knows that more would not make it shorter."""
    by_rank = {rank_plan.rank: rank_plan for rank_plan in ranks}
    if at_most < 1 or assignment.dp_size > 1:
        return ()
    spans = {
        owners: until
        for owners in _replaying(assignment, groups, by_rank)
        if (until := _until(owners, target, assignment, by_rank)) - by_rank[owners[0]].from_version
        >= STEPS_MIN
    }
    free = [r.rank for r in reports if r.can_help and by_rank[r.rank].policy.rests]
    wanted = predictor.wanted(spans, at_most, len(free)) if predictor is not None else {}
    chosen: dict[tuple[int, ...], list[tuple[int, ...]]] = {owners: [] for owners in spans}
    for _ in range(at_most):  # in turns: the slowest replay is what all wait for
        for owners, copies in chosen.items():
            if len(free) >= len(owners) and len(copies) < wanted.get(owners, at_most):
                copies.append(_nearest(owners, free))
                free = [rank for rank in free if rank not in copies[-1]]
    return tuple(
        Help(
            owner=owner,
            helpers=tuple(copy[place] for copy in copies),
            until=spans[owners],
            together=owners if len(owners) > 1 else (),
        )
        for owners, copies in chosen.items()
        if copies
        for place, owner in enumerate(owners)
    )


def words(sharing: Sequence[Help]) -> list[str]:
    """For people: of each group that is helped, by whom and up to where."""
    told = []
    for owners, until in dict.fromkeys((help.together or (help.owner,), help.until) for help in sharing):
        helpers = [help.helpers for help in sharing if help.owner in owners]
        copies = [rank for copy in zip(*helpers, strict=True) for rank in copy]
        told.append(f"{_ranks(copies)} to help {_ranks(owners)} up to version {until}")
    return told


def _replaying(
    assignment: Assignment, groups: RecoveryGroups, by_rank: Mapping[int, RankPlan]
) -> list[tuple[int, ...]]:
    """The ranks of each recovery group that does nothing but replay, by stage: all from one version."""
    replaying = []
    for members in groups.together(assignment.groups(), assignment.stages):
        owners = tuple(rank for (rank,) in members)
        plans = [by_rank[rank] for rank in owners]
        if (
            all(rank_plan.policy.replays for rank_plan in plans)
            and len({rank_plan.from_version for rank_plan in plans}) == 1
            and (len(owners) == 1 or all(len(assignment.stages[rank]) == 1 for rank in owners))
        ):
            replaying.append(owners)
    return replaying


def _nearest(owners: Sequence[int], free: Sequence[int]) -> tuple[int, ...]:
    """One for each stage of the group, ascending: neighbours feed each other."""
    by_distance = sorted(free, key=lambda rank: (min(abs(rank - owner) for owner in owners), rank))
    return tuple(sorted(by_distance[: len(owners)]))


def _until(
    owners: Sequence[int], target: int, assignment: Assignment, by_rank: Mapping[int, RankPlan]
) -> int:
    own = {stage for owner in owners for stage in assignment.stages[owner]}
    beside = {
        other for stage in own for other in (stage - 1, stage + 1) if 0 <= other < assignment.num_stages
    }
    neighbours = {rank for stage in beside - own for rank in assignment.holders(stage)}
    return min([target, *(by_rank[rank].from_version for rank in neighbours)])


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
