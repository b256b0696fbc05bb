"""Conversion between a row and the planner, and vacant slots under a strategy that shrinks the world."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import as_json
from swift_ft.planner import (
    SETTINGS,
    Assignment,
    Plan,
    PlanConfig,
    RankPlan,
    RecoveryGroups,
    Refusals,
    Report,
    Strategy,
    StreamSummary,
    finishable,
    plan,
    reroutes,
    shrinks,
    without_log,
    worth_waiting_s,
)
from swift_ft.planner.strategies import refused_with
from swift_ft_services.coordinator.job_record import LACKS, JobRow, State, count_of, replicas_of

# Vacant slots under a strategy that shrinks the world: the holder was lost, and the others continue without it.
#
# With "auto" and a `lost_shard` the job first waits for another process. It continues without the rank once none is
# expected: its launcher has reported so, or no process has joined for a long time. From then on it behaves as with
# "shrink".
#
# ::
#
#     (auto)        `give_up`: no process is expected for the slot; `Awaited`: none has joined in time
#     (a death)     `vacate`: the slots of its cell are vacant in the next generation; processes that hold the others
#                   of them are spares
#     (a plan)      `named`: if the batches of that data-parallel rank are dropped (`lost_shard` "drop"), the plan is
#                   not exact, with that reason; so the log is given up, and the target saved
#     (RUNNING)     `mark_vacant_since`: records the version since which the slot is vacant
#     (a Join)      `fill`: once processes hold all slots of the cell, it takes part, in a new generation; if its
#                   batches were dropped, the log is given up again: the records of the current step lack its part
#
# A checkpoint saved while a slot was vacant has no shard of it. A later holder loads a replica's shard, which
# has the same state. Only these strategies do so, so only a job with one of them can use such a checkpoint.


def job_shrinks(config: Mapping[str, str]) -> bool:
    """Returns whether a job with this configuration continues without a lost rank."""
    return shrinks(config.get("strategy", ""))


def shrinks_late(config: Mapping[str, str]) -> bool:
    """Returns whether such a job continues without a lost rank only once no process is expected for it."""
    setting = SETTINGS.get(config.get("strategy", ""))
    return setting is not None and bool(setting.once_vacant) and bool(config.get("lost_shard"))


def strategy_of(row: JobRow, strategy: str) -> str:
    """Returns the strategy to recover by, for the configured `strategy`. Steps run while a slot was vacant are not
    replayed, because the log does not hold all of their records."""
    late = shrinks_late(row.config)
    return SETTINGS[strategy].once_vacant if late and (row.vacant or lacks_steps(row)) else strategy


def lacks_steps(row: JobRow) -> bool:
    below, newest = row.unlogged_below, max(row.checkpoints, default=0)
    return below is not None and (below == LACKS or newest < below)


def wants_checkpoint(row: JobRow) -> str:
    return "the log lacks steps that were done while a slot was vacant" if lacks_steps(row) else ""


class Awaited:
    """How long each slot has been without a holder. Not durable: a restarted coordinator starts to wait again."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def overdue(self, row: JobRow, limit_s: float, now: float) -> list[int]:
        """Returns the slots that no process has joined for `limit_s` (`patience_s`). Returns none if the others could
        not continue without them: then waiting is all that the job can do."""
        waits = shrinks_late(row.config) and row.state in (State.FENCING, State.PLANNING)
        missing = [slot for slot in row.slots() if slot not in row.holders] if waits else []
        if any(slot in row.holders for slot in self._since):
            self._since = {}  # a process has joined: others may be on their way
        self._since = {slot: self._since.get(slot, now) for slot in missing}
        late = [slot for slot, since in self._since.items() if now - since > limit_s]
        return late if late and whole(row, set(row.slots()) - {*row.given_up, *late}) else []


def patience_s(row: JobRow, measured: Iterable[pb.RankMeasured], least_s: float, most_s: float) -> float:
    """Returns how long to wait for a process: as long as waiting costs less than continuing without it, bounded by
    `least_s` and `most_s`. Returns `most_s` if continuing would also make the run inexact."""
    if _drops(row):
        return most_s
    worth_s = worth_waiting_s(measured, replicas=replicas_of(row.config), reroutes=reroutes_lost(row))
    return most_s if worth_s is None else min(max(worth_s, least_s), most_s)


def give_up(row: JobRow, slots: Iterable[int]) -> str:
    """Records that no process is expected for `slots`. Returns why the job cannot continue without them; empty if it
    can or waits for others."""
    if not shrinks_late(row.config) or row.state is State.FORMING:
        return ""
    row.given_up = sorted({*row.given_up, *slots} - set(row.vacant))
    if whole(row, set(row.slots()) - set(row.given_up)):
        return ""
    ranks = ", ".join(map(str, row.given_up))
    left = "no whole pipeline is left without it"
    if reroutes_lost(row):
        left = "nobody of its stage is left"
    return f"no process takes the place of rank {ranks}, and {left}"


def vacate(row: JobRow, dead: Iterable[int]) -> list[int]:
    """(before a new generation) Returns the slots that become vacant: all of the dead ones' cells if a whole pipeline
    is left. Else none: the job continues from its checkpoint with other processes."""
    dead = set(dead)
    left = {rank for rank, holder in row.seated().items() if rank not in dead and not holder.gone}
    if shrinks_late(row.config):
        dead, row.given_up = set(row.given_up), []
    elif not job_shrinks(row.config) or row.state is State.FORMING or not whole(row, left):
        return []
    slots = sorted({slot for lost in dead for slot in row.cell(lost)} - set(row.vacant))
    for slot in slots:
        row.vacant[slot] = None
    if slots:
        row.shards = {}  # no checkpoint may combine shards from before and after this loss
        row.rolled_back_in = row.generation + 1
    return slots


def fill(row: JobRow, slot: int) -> str:
    """A process has joined a vacant slot. Returns the reason for a new generation; empty if its cell lacks others."""
    cell = row.cell(slot)
    if any(other not in row.holders for other in cell):
        return ""
    for other in cell:
        del row.vacant[other]
    row.shards = {}  # no shards saved without this slot may form a complete checkpoint
    row.rolled_back_in = row.generation + 1
    row.log_ends = row.log_ends or _drops(row)
    row.unlogged_below = LACKS if shrinks_late(row.config) else None
    return f"rank {slot} has come back"


def named(row: JobRow, plan: Plan) -> Plan:
    """Returns the plan, marked not exact if slots are vacant since the job last ran and their batches dropped."""
    if not _drops(row):
        return plan
    new = [slot for slot, since in row.vacant.items() if since is None]
    earlier = [since for since in row.vacant.values() if since is not None and since > plan.target_version]
    if not (new or earlier):
        return plan
    return replace(plan, exact=False, reason=f"{plan.reason}; not exact: {_words(row)}")


def mark_vacant_since(row: JobRow, version: int) -> None:
    """(RUNNING) Records the version since which slots are vacant: this one, or an earlier one that was restored."""
    if _drops(row) and any(since is not None and since > version for since in row.vacant.values()):
        row.inexact_since = min(version, version if row.inexact_since is None else row.inexact_since)
    row.vacant = {
        slot: version if since is None else min(since, version) for slot, since in row.vacant.items()
    }
    if row.unlogged_below == LACKS and not row.vacant:
        row.unlogged_below = version


def lacking(row: JobRow, version: int, config: Mapping[str, str]) -> str:
    """Returns why a job with this configuration cannot begin from the checkpoint of `version`; empty if it can."""
    if job_shrinks(config) or shrinks_late(config):
        return ""
    slots = [slot for slot, since in row.vacant.items() if since is None or since <= version]
    if not slots:
        return ""
    return f"it has no part of rank {slots[0]}, whose slot was vacant (--strategy shrink goes on from it)"


def whole(row: JobRow, left: set[int]) -> bool:
    """Returns whether the job can continue with the slots in `left`: one data-parallel rank is complete, or, where
    microbatches are rerouted, each stage group has a rank."""
    counts = {name: count_of(row.config, name, 1) for name in ("replicas", "shards")}
    full = Assignment.grid(row.world_size, **counts, tensor=count_of(row.config, "tensor_parallel", 1))
    held = full.held_by({slot: slot for slot in left if left.issuperset(row.cell(slot))})
    if not reroutes_lost(row):
        return bool(held.whole_origins())
    return not held.lost_stages()


def reroutes_lost(row: JobRow) -> bool:
    """Returns whether peers of a lost rank take over its microbatches."""
    return reroutes(row.config.get("strategy", ""), row.config.get("lost_shard", ""))


def _drops(row: JobRow) -> bool:
    return row.config.get("lost_shard") == "drop"


def _words(row: JobRow) -> str:
    slots = sorted(row.vacant)
    ranks = ", ".join(map(str, slots))
    if len(slots) == 1:
        return f"the slot of rank {ranks} is vacant, and nobody computes its batches"
    return f"the slots of ranks {ranks} are vacant, and nobody computes their batches"


def config_of(config: Mapping[str, str]) -> PlanConfig:
    """Returns the planner's configuration. Raises ValueError for an invalid strategy or invalid groups."""
    strategy = config.get("strategy", "auto")
    if strategy in SETTINGS and replicas_of(config) == 1:
        strategy = SETTINGS[strategy].without_replicas or strategy
    return PlanConfig(
        strategy=strategy,
        inexact_undo=config.get("undo") == "arithmetic",
        groups=RecoveryGroups.parse(config.get("groups", "")),
        helpers=count_of(config, "helpers", 0),
    )


def assignment_of(row: JobRow) -> Assignment:
    """Returns the stages and shards of the ranks. Raises ValueError, in one line, if they are inconsistent."""
    members = {slot: holder.member for slot, holder in row.seated().items()}
    return Assignment.from_reports(
        num_stages=row.num_stages, stages=row.stages, shards=row.stage_shards, members=members
    )


def stages_problem(row: JobRow) -> str:
    """Returns why no recovery is possible with the reported stages, in one line; empty if it is possible."""
    try:
        assignment = assignment_of(row)
    except ValueError as problem:
        return str(problem)
    return config_of(row.config).groups.problem(assignment.num_stages, assignment.stages)


def decide(
    row: JobRow, streams: Mapping[str, StreamSummary], measured: Mapping[int, pb.RankMeasured]
) -> tuple[Plan | None, str]:
    reports = [
        replace(report, version=None, undo_to=None, forward_to=None, finish_to=None)
        if rank in row.distrusted
        else report
        for rank, report in sorted(row.reports.items())
    ]
    planned = partial(
        plan,
        finishable(reports),
        assignment_of(row),
        streams,
        tuple(v for v in row.checkpoints if v not in row.unloadable),
        replace(
            config_of({**row.config, "strategy": strategy_of(row, row.config.get("strategy", "auto"))}),
            groups=RecoveryGroups.parse(row.groups),
        ),
        measured=measured,
    )
    return without_log(planned, row.refused) if row.log_ends else planned(row.refused)


def count_refusal(row: JobRow, rank: int, reason: str) -> None:
    """Excludes what `rank` refused from the rest of this recovery, and distrusts states that depend on it."""
    if row.state is not State.RECOVERING:
        # Its log accepts no records any more, or there is another error that the plan did not cause.
        row.refused = row.refused.and_everything(f"rank {rank} refused: {reason}")
        return
    assert row.plan is not None
    mine = row.plan.of(rank)
    why = f"rank {rank} refused {mine.strategy}: {reason}"
    if mine.strategy is Strategy.CHECKPOINT:
        # The checkpoint cannot be loaded: the previous one is left, or none. If none can be used, this one is kept for
        # a new start, with another trainer or a repaired disk.
        row.unloadable = sorted({*row.unloadable, mine.from_version})
        row.refused = replace(row.refused, reason=why)
        return
    shared = row.plan.help_of(rank)
    if shared is not None:
        # Whichever rank is at fault, the owner replays the stage again alone, before replay is given up altogether.
        row.refused = row.refused.and_help(f"rank {rank} refused a shared replay: {reason}")
        row.distrusted = sorted({*row.distrusted, *_touched(row, row.plan, row.plan.of(shared.owner))})
        return
    gives = frozenset(other.strategy for other in row.plan.ranks if rank in other.sources)
    if mine.policy.rests and not gives:
        row.refused = row.refused.and_everything(why)
        return
    if mine.policy.rests:
        refused = gives
    elif mine.policy.own_step and not row.distrusted:
        # It cannot complete its own step, which implies nothing about other ranks' steps; a second refusal does.
        refused = frozenset()
    else:
        refused = refused_with(mine.strategy)
    row.refused = row.refused.and_of(refused, why)
    row.distrusted = sorted({*row.distrusted, *_touched(row, row.plan, mine)})


def give_up_log(row: JobRow, plan: Plan) -> None:
    """Gives up the log: it belongs to a discarded history. It is emptied before any rank restores, and any further
    recovery before RUNNING restores too."""
    if plan.restores:
        row.refused = row.refused.and_everything(plan.ranks[0].reason)
    else:
        row.log_ends = True
    row.rolled_back_in = row.generation
    row.shards = {v: ranks for v, ranks in row.shards.items() if v <= plan.target_version}


def forget_recovery(row: JobRow) -> None:
    """Ends the recovery: the next one starts without its refusals, and with the current log."""
    row.refused, row.distrusted, row.log_ends = Refusals(), [], False
    row.checkpoints = [v for v in row.checkpoints if v not in row.unloadable]
    row.unloadable = []


def _touched(row: JobRow, plan: Plan, refused: RankPlan) -> set[int]:
    """Returns the ranks whose state may depend on what was refused, whatever they report.

    A replay feeds the other replays. A copy goes only to the replicas of the rank.
    """
    group = assignment_of(row).group(refused.rank)
    touched = {copy.rank for copy in plan.copies if copy.rank in group}
    if not refused.policy.rests:
        touched.add(refused.rank)
    if plan.redoes(refused.rank):
        touched |= {r.rank for r in plan.ranks if plan.redoes(r.rank)}
    return touched


# What trace events show of reports and plans.


def report_fields(report: Report) -> dict[str, object]:
    fields: dict[str, object] = {"rank": report.rank, "version": report.version}
    if report.undo_to is not None:
        fields |= {"undo_to": report.undo_to, "undo_exact": report.undo_exact}
    if report.forward_to is not None:
        fields["forward_to"] = report.forward_to
    if report.finish_to is not None:
        fields["finish_to"] = report.finish_to
    if report.snapshots:
        fields["snapshots"] = [list(held) for held in report.snapshots]
    return fields


def plan_fields(plan: Plan) -> dict[str, object]:
    return {
        "target_version": plan.target_version,
        "exact": plan.exact,
        "ranks": [_rank_fields(r) for r in plan.ranks],
        **({"help": [as_json(help) for help in plan.help]} if plan.help else {}),
        **({"predictions": [as_json(one) for one in plan.predictions]} if plan.predictions else {}),
        "reason": plan.reason,
    }


def _rank_fields(r: RankPlan) -> dict[str, object]:
    sources = {"sources": list(r.sources)} if r.sources else {}
    return {
        "rank": r.rank,
        "strategy": str(r.strategy),
        "from_version": r.from_version,
        **sources,
        "reason": r.reason,
    }
