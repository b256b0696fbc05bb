"""From a row to the planner and back: what is asked, what a refusal means for the next plan."""

from collections.abc import Mapping
from dataclasses import replace

from services.coordinator.row import JobRow, State, count_of, replicas_of
from services.coordinator.vacancies import strategy_of
from swift.recovery import (
    Assignment,
    Checkpoints,
    Plan,
    PlanConfig,
    RankMeasured,
    RankPlan,
    RecoveryGroups,
    Refusals,
    Strategy,
    StreamSummary,
    finishable,
    plan_off_log,
    shrinks,
)
from swift.recovery.strategies import refused_with


def config_of(config: Mapping[str, str]) -> PlanConfig:
    """What the job's configuration says to the planner. ValueError: a strategy or groups that cannot be."""
    strategy = config.get("strategy", "auto")
    if shrinks(strategy) and replicas_of(config) == 1:
        strategy = "auto"  # a stage that moves is replayed: nobody else has it
    return PlanConfig(
        strategy=strategy,
        inexact_undo=config.get("undo") == "arithmetic",
        groups=RecoveryGroups.parse(config.get("groups", "")),
        helpers=count_of(config, "helpers", 0),
    )


def assignment_of(row: JobRow) -> Assignment:
    """Of this generation. Raises ValueError, in one line, if nothing can be built on what its ranks have told."""
    members = {slot: holder.member for slot, holder in row.holders.items()}
    return Assignment.told(
        num_stages=row.num_stages, stages=row.stages, shards=row.stage_shards, members=members
    )


def stages_problem(row: JobRow) -> str:
    """Why nothing can be recovered with the stages that ranks have told, in one line; empty: it can."""
    try:
        assignment = assignment_of(row)
    except ValueError as problem:
        return str(problem)
    return config_of(row.config).groups.problem(assignment.num_stages, assignment.stages)


def decide(
    row: JobRow, streams: Mapping[str, StreamSummary], measured: Mapping[int, RankMeasured]
) -> tuple[Plan | None, str]:
    """The plan for what was reported, and its reason."""
    reports = [
        replace(report, version=None, undo_to=None, forward_to=None, finish_to=None)
        if rank in row.distrusted
        else report
        for rank, report in sorted(row.reports.items())
    ]
    return plan_off_log(
        finishable(reports),
        assignment_of(row),
        streams,
        Checkpoints(versions=tuple(v for v in row.checkpoints if v not in row.unloadable)),
        replace(
            config_of({**row.config, "strategy": strategy_of(row, row.config.get("strategy", "auto"))}),
            groups=RecoveryGroups.parse(row.groups),
            groups_since=row.groups_since,
        ),
        row.refused,
        measured,
        log_ends=row.log_ends,
    )


def count_refusal(row: JobRow, rank: int, reason: str) -> None:
    """What `rank` refused is not planned again in this recovery, and what came of it is not trusted."""
    if row.state is not State.RECOVERING:
        # Its log takes nothing any more, or something else is wrong that no plan is to blame for.
        row.refused = row.refused.and_everything(f"rank {rank} refused: {reason}")
        return
    assert row.plan is not None
    mine = row.plan.of(rank)
    why = f"rank {rank} refused {mine.strategy}: {reason}"
    if mine.strategy is Strategy.CHECKPOINT:
        # It cannot be loaded: the one before it, or nothing, is left. Should nothing do, it stays for a new start, with
        # another trainer or a mended disk.
        row.unloadable = sorted({*row.unloadable, mine.from_version})
        row.refused = replace(row.refused, reason=why)
        return
    shared = row.plan.help_of(rank)
    if shared is not None or (row.plan.saves and mine.policy.rests):
        # Whoever is to blame: the stage is replayed again, by its owner alone, before any replay is given up. So it is
        # where a rank cannot save a state that the log does not lead to: who holds it is replayed exactly.
        what = "a shared replay" if shared is not None else "to save what the log does not lead to"
        row.refused = row.refused.and_help(f"rank {rank} refused {what}: {reason}")
        owners = [h.owner for h in ([shared] if shared is not None else row.plan.help)]
        touched = {other for owner in owners for other in _touched(row, row.plan, row.plan.of(owner))}
        row.distrusted = sorted({*row.distrusted, *touched})
        return
    gives = frozenset(other.strategy for other in row.plan.ranks if rank in other.sources)
    if mine.policy.rests and not gives:
        row.refused = row.refused.and_everything(why)
        return
    if mine.policy.rests:
        refused = gives
    elif mine.policy.own_step and not row.distrusted:
        # Its own step is lost to it, which says nothing about other ranks'. A second time it does.
        refused = frozenset()
    else:
        refused = refused_with(mine.strategy)
    row.refused = row.refused.and_of(refused, why)
    row.distrusted = sorted({*row.distrusted, *_touched(row, row.plan, mine)})


def give_up_log(row: JobRow, plan: Plan) -> None:
    """What is in the log belongs to a history that is given up. It goes before anybody restores, and whatever comes
    before RUNNING restores as well."""
    if plan.restores:
        row.refused = row.refused.and_everything(plan.ranks[0].reason)
    else:
        row.log_ends = True
    row.rolled_back_in = row.generation
    row.shards = {v: ranks for v, ranks in row.shards.items() if v <= plan.target_version}


def forget_recovery(row: JobRow) -> None:
    """It is over: the next one begins without what was refused in it, and with the log that there is now."""
    row.refused, row.distrusted, row.log_ends = Refusals(), [], False
    row.checkpoints = [v for v in row.checkpoints if v not in row.unloadable]
    row.unloadable = []


def _touched(row: JobRow, plan: Plan, refused: RankPlan) -> set[int]:
    """The ranks whose state may have come of what was refused, whatever they report.

    A replay feeds the replays beside it. A copy goes to the replicas of the rank alone.
    """
    group = assignment_of(row).group(refused.rank)
    touched = {copy.rank for copy in plan.copies if copy.rank in group}
    if not refused.policy.rests:
        touched.add(refused.rank)
    if plan.redoes(refused.rank):
        touched |= {r.rank for r in plan.ranks if plan.redoes(r.rank)}
    return touched
