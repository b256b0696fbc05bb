"""Which ranks help a replay: those that would only wait for it.

A helper computes some of the microbatches of every step that it helps with. What it reads must be in the log already,
and what is sent must have arrived where it is needed: so a replay is shared up to the version from which on a stage
beside it is computed again as well, and the rest, where the two feed each other, is its owner's alone.
"""

from collections.abc import Iterable, Mapping, Sequence

from swift.recovery.types import REPLAYS, Help, Layout, RankPlan, Report, Strategy

STEPS_MIN = 2
"""For fewer steps a stage is not built again elsewhere."""


def helps(
    ranks: Sequence[RankPlan], target: int, layout: Layout, reports: Iterable[Report], at_most: int
) -> tuple[Help, ...]:
    """At most `at_most` helpers for each replay, the nearest first; a rank helps one replay only."""
    by_rank = {rank_plan.rank: rank_plan for rank_plan in ranks}
    if at_most < 1 or layout.columns() > 1:
        return ()
    spans = {
        rank_plan.rank: until
        for rank_plan in ranks
        if rank_plan.strategy in REPLAYS
        and (until := _until(rank_plan, target, layout, by_rank)) - rank_plan.from_version >= STEPS_MIN
    }
    free = [r.rank for r in reports if r.can_help and by_rank[r.rank].strategy is Strategy.KEEP]
    chosen: dict[int, list[int]] = {owner: [] for owner in spans}
    for _ in range(at_most):  # in turns: the slowest replay is what all wait for
        for owner, taken in chosen.items():
            if free:
                nearest = min(free, key=lambda rank: (abs(rank - owner), rank))
                free.remove(nearest)
                taken.append(nearest)
    return tuple(
        Help(owner=owner, helpers=tuple(taken), until=spans[owner])
        for owner, taken in chosen.items()
        if taken
    )


def _until(owner: RankPlan, target: int, layout: Layout, by_rank: Mapping[int, RankPlan]) -> int:
    own = layout.stages[owner.rank]
    beside = {other for stage in own for other in (stage - 1, stage + 1) if 0 <= other < layout.num_stages}
    neighbours = {rank for stage in beside.difference(own) for rank in layout.owners(stage)}
    return min([target, *(by_rank[rank].from_version for rank in neighbours)])
