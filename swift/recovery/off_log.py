"""States that the log does not lead to, and what a plan makes of them.

A rank whose state has other bits than the log leads to is *off the log*: its sends are not the logged ones, and what
its neighbours have logged of the step under way is not what they do from now on. It says so in its reports until the
log has begun anew. (No strategy leaves a rank so today: the seam is for those that are not exact.)

    a rank that is off the log holds the target    every rank saves it before it is Ready (`Plan.saves`)
    that checkpoint is complete (`log_ends`)       the log is given up; everybody keeps the target, or loads it

Before that the older checkpoint and the log are as they were: nothing of what comes off the log is written there.
So others are replayed from them exactly, while who is off the log keeps what it has. It is not kept

    where a stage beside it is replayed too    what its predecessor had not got out must be made again, bit for bit
    where help was refused in this recovery    nobody could save it: it is replayed, exactly and alone
    where a newer checkpoint is complete       that one and the log say what the state is
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from swift.recovery.assignment import Assignment
from swift.recovery.decision import Plan
from swift.recovery.measured import RankMeasured
from swift.recovery.plan import plan
from swift.recovery.refusals import Refusals
from swift.recovery.types import Checkpoints, PlanConfig, Report, StreamSummary


def plan_off_log(
    reports: Sequence[Report],
    assignment: Assignment,
    log_inventory: Mapping[str, StreamSummary],
    checkpoints: Checkpoints,
    config: PlanConfig,
    refused: Refusals = Refusals(),  # noqa: B008  (frozen)
    measured: Mapping[int, RankMeasured] = MappingProxyType({}),
    *,
    log_ends: bool = False,
) -> tuple[Plan | None, str]:
    """As `plan`, which it asks. `log_ends`: the log is given up whatever is planned; nothing of it is to be read."""
    reports = list(reports)
    while True:
        chosen, reason = plan(reports, assignment, log_inventory, checkpoints, config, refused, measured)
        if chosen is None or chosen.restores:
            return chosen, reason
        if log_ends and chosen.reads_log:
            refused = refused.and_everything(
                "the log has ended, and there is more to replay than a checkpoint"
            )
            continue
        kept = [r.rank for r in reports if r.off_log and r.version is not None]
        useless = {
            rank
            for rank in kept
            if not log_ends and _is_useless(rank, chosen, assignment, checkpoints, refused)
        }
        if not useless:
            break
        reports = [_without_state(r) if r.rank in useless else r for r in reports]
    if not (kept or log_ends):
        return chosen, reason
    chosen = replace(chosen, exact=False, saves=not log_ends)
    chosen = replace(chosen, reason="; ".join([chosen.reason, *_words(chosen, kept, log_ends=log_ends)]))
    return chosen, chosen.reason


def _is_useless(
    rank: int, chosen: Plan, assignment: Assignment, checkpoints: Checkpoints, refused: Refusals
) -> bool:
    newest = checkpoints.newest
    covered = newest is not None and newest >= chosen.target_version
    return refused.help or covered or _replays_beside(rank, chosen, assignment)


def _replays_beside(rank: int, chosen: Plan, assignment: Assignment) -> bool:
    """Another rank that sends to this one, or is sent something by it, replays a step."""
    stages = assignment.stages[rank]
    beside = {
        other for stage in stages for other in (stage - 1, stage + 1) if 0 <= other < assignment.num_stages
    }
    owners = {owner for stage in beside for owner in assignment.holders(stage)} - {rank}
    return any(chosen.of(owner).from_version < chosen.target_version for owner in owners)


def _without_state(report: Report) -> Report:
    return replace(report, version=None, undo_to=None, forward_to=None, finish_to=None, off_log=False)


def _words(chosen: Plan, kept: Sequence[int], *, log_ends: bool) -> list[str]:
    words = [f"not bit for bit: {_ranks(kept)} came off the log"] if kept else []
    if log_ends:
        words.append(f"the log does not lead to version {chosen.target_version}, and begins anew")
    else:
        words.append(f"every rank saves version {chosen.target_version}, and the log ends there")
    return words


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
