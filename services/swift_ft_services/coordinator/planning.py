"""From a record to the planner and back, and slots that are vacant under a strategy that shrinks the world."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from swift_ft.planner import (
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
    reroutes,
    shrinks,
    worth_waiting_s,
)
from swift_ft.planner import shrinks as strategy_shrinks
from swift_ft.planner.strategies import refused_with
from swift_ft_services.coordinator.job_record import LACKS, JobRow, State, count_of, replicas_of

# Slots that are vacant under a strategy that shrinks the world: the holder was lost, the others go on without it.
#
# With "auto" and a `lost_shard` they wait for another process first, and go on without the rank once it is known that
# none comes: its launcher has said so, or nobody has joined for a long time. From there on it is as with "shrink".
#
# ::
#
#     (auto)        `give_up`: no process comes for the slot; `Awaited`: none has come
#     (a death)     `vacate`: the slot is vacant in the generation that follows
#     (a plan)      `named`: if nobody computes the batches of that data-parallel rank (`lost_shard` "drop") it is not
#                   exact, with that reason; so the log is given up, and the target saved
#     (RUNNING)     `mark_vacant_since`: since that version
#     (a Join)      `fill`: another process holds the slot, in a generation of its own; if nobody has computed its
#                   batches, the log is given up again: what is logged of the step under way lacks its part
#
# A checkpoint that was made while a slot was vacant has no part of it. Whoever holds the slot later loads the part of a
# replica, which has the same state; that is a part of such a strategy, so it takes a job with one.


def job_shrinks(config: Mapping[str, str]) -> bool:
    """A job with this configuration goes on without a rank that is lost."""
    return strategy_shrinks(config.get("strategy", ""))


def shrinks_late(config: Mapping[str, str]) -> bool:
    """So does one with this, once no process comes for a lost rank."""
    return config.get("strategy") == "auto" and bool(config.get("lost_shard"))


def strategy_of(row: JobRow, strategy: str) -> str:
    """By which the job recovers, if it is configured with `strategy`: what was done while a slot was vacant is not
    replayed, because the log has not all of it."""
    late = shrinks_late(row.config)
    return "shrink" if late and (row.vacant or lacks_steps(row)) else strategy


def lacks_steps(row: JobRow) -> bool:
    """The log lacks some behind the newest checkpoint."""
    below, newest = row.unlogged_below, max(row.checkpoints, default=0)
    return below is not None and (below == LACKS or newest < below)


def wants_checkpoint(row: JobRow) -> str:
    """(RUNNING) Why one is needed soon; empty: none is."""
    return "the log lacks steps that were done while a slot was vacant" if lacks_steps(row) else ""


class Awaited:
    """For how long a slot has been without a holder. Not durable: a coordinator that begins anew waits anew."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def overdue(self, row: JobRow, limit_s: float, now: float) -> list[int]:
        """Those for which nobody has come for so long (`patience_s`); none if the others could not go on without them:
        then the job has nothing better to do than to wait."""
        waits = shrinks_late(row.config) and row.state in (State.FENCING, State.PLANNING)
        missing = [slot for slot in row.slots() if slot not in row.holders] if waits else []
        if any(slot in row.holders for slot in self._since):
            self._since = {}  # one has come: others may be on their way
        self._since = {slot: self._since.get(slot, now) for slot in missing}
        late = [slot for slot, since in self._since.items() if now - since > limit_s]
        return late if late and whole(row, set(row.slots()) - {*row.given_up, *late}) else []


def patience_s(row: JobRow, measured: Iterable[RankMeasured], least_s: float, most_s: float) -> float:
    """How long to wait for a process: as long as that costs less than to go on without it, within these bounds. If to
    go on costs the bits as well, to the end."""
    if _drops(row):
        return most_s
    worth_s = worth_waiting_s(measured, replicas=replicas_of(row.config), reroutes=reroutes_lost(row))
    return most_s if worth_s is None else min(max(worth_s, least_s), most_s)


def give_up(row: JobRow, slots: Iterable[int]) -> str:
    """No process comes for these. Why the job cannot go on without them; empty: it can, or waits for others."""
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
    """(before a new generation) The slots of the dead that become vacant: all, if a whole pipeline is left; else none,
    and the job goes on from its checkpoint with other processes."""
    dead = sorted(dead)
    left = {rank for rank, holder in row.holders.items() if rank not in dead and not holder.gone}
    if shrinks_late(row.config):
        dead, row.given_up = row.given_up, []
    elif not job_shrinks(row.config) or row.state is State.FORMING or not whole(row, left):
        return []
    for slot in dead:
        row.vacant[slot] = None
    if dead:
        row.shards = {}  # nothing that lacks a part of this slot, and was begun with it, becomes complete
        row.rolled_back_in = row.generation + 1
    return dead


def fill(row: JobRow, slot: int) -> str:
    """(before a new generation) Another process has come for it. Why the generation is made."""
    del row.vacant[slot]
    row.shards = {}  # nothing that was begun without this slot becomes complete
    row.rolled_back_in = row.generation + 1
    row.log_ends = row.log_ends or _drops(row)
    row.unlogged_below = LACKS if shrinks_late(row.config) else None
    return f"rank {slot} has come back"


def named(row: JobRow, plan: Plan) -> Plan:
    """The plan; if slots have become vacant since the job last ran, and nobody computes their batches: not exact."""
    if not _drops(row):
        return plan
    new = [slot for slot, since in row.vacant.items() if since is None]
    earlier = [since for since in row.vacant.values() if since is not None and since > plan.target_version]
    if not (new or earlier):
        return plan
    return replace(plan, exact=False, reason=f"{plan.reason}; not exact: {_words(row)}")


def mark_vacant_since(row: JobRow, version: int) -> None:
    """(RUNNING) Since this version, or an earlier one that was restored, they are vacant."""
    if _drops(row) and any(since is not None and since > version for since in row.vacant.values()):
        row.inexact_since = min(version, version if row.inexact_since is None else row.inexact_since)
    row.vacant = {
        slot: version if since is None else min(since, version) for slot, since in row.vacant.items()
    }
    if row.unlogged_below == LACKS and not row.vacant:
        row.unlogged_below = version


def lacking(row: JobRow, version: int, config: Mapping[str, str]) -> str:
    """Why a job with this configuration cannot begin with that checkpoint; empty: it can."""
    if job_shrinks(config) or shrinks_late(config):
        return ""
    slots = [slot for slot, since in row.vacant.items() if since is None or since <= version]
    if not slots:
        return ""
    return f"it has no part of rank {slots[0]}, whose slot was vacant (--strategy shrink goes on from it)"


def whole(row: JobRow, left: set[int]) -> bool:
    """The job can go on with these slots: one data-parallel rank has all of its own; where microbatches are rerouted,
    each stage group has one."""
    full = Assignment.grid(row.world_size, replicas=replicas_of(row.config))
    held = full.held_by({slot: slot for slot in left})
    if not reroutes_lost(row):
        return bool(held.whole_origins())
    return not held.lost_stages()


def reroutes_lost(row: JobRow) -> bool:
    """Peers of a lost rank share its microbatches."""
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
