"""States that the log does not lead to, and what a plan makes of them.

A replay that adds gradients in another order (`Help.fast`) ends with other bits than the rank had that was lost. From
its second step on its sends are not the logged ones, and what its neighbours have logged of the step under way, and
will log, is not what they do from now on. The owner is *off the log*, and says so until the log has begun anew.

    a rank that has replayed so, or is to      every rank saves the target before it is Ready (`Plan.saves`)
    that checkpoint is complete (`log_ends`)   the log is given up; everybody keeps the target, or loads it

Before that the older checkpoint and the log are as they were: nothing of what comes off the log is written there.
So others are replayed from them exactly, while who is off the log keeps what it has. It is not kept

    where a stage beside it is replayed too    what its predecessor had not got out must be made again, bit for bit
    where help was refused in this recovery    the replay is done again, exactly, by its owner alone
    where a newer checkpoint is complete       that one and the log say what the state is

For the first of these reasons a replay beside which another one goes on is shared in the exact way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from swift.recovery.assignment import Assignment
from swift.recovery.measured import RankMeasured
from swift.recovery.plan import plan
from swift.recovery.types import (
    Checkpoints,
    Help,
    Plan,
    PlanConfig,
    Refusals,
    Report,
    StreamSummary,
)


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
        found, reason = plan(reports, assignment, log_inventory, checkpoints, config, refused, measured)
        if found is None or found.restores:
            return found, reason
        if log_ends and found.reads_log:
            refused = refused.and_everything(
                "the log has ended, and there is more to replay than a checkpoint"
            )
            continue
        kept = [r.rank for r in reports if r.off_log and r.version is not None]
        useless = {
            rank
            for rank in kept
            if not log_ends and _is_useless(rank, found, assignment, checkpoints, refused)
        }
        if not useless:
            break
        reports = [_without_state(r) if r.rank in useless else r for r in reports]
    sharing = tuple(_combined(help, found, assignment, checkpoints, config) for help in found.help)
    fast = sorted(help.owner for help in sharing if help.fast)
    if not (kept or fast or log_ends):
        return found, reason
    found = replace(found, help=sharing, exact=False, saves=not log_ends)
    found = replace(found, reason="; ".join([found.reason, *_words(found, kept, fast, log_ends=log_ends)]))
    return found, found.reason


def _is_useless(
    rank: int, found: Plan, assignment: Assignment, checkpoints: Checkpoints, refused: Refusals
) -> bool:
    newest = checkpoints.newest
    covered = newest is not None and newest >= found.target_version
    return refused.help or covered or _replays_beside(rank, found, assignment)


def _combined(
    help: Help, found: Plan, assignment: Assignment, checkpoints: Checkpoints, config: PlanConfig
) -> Help:
    newest = checkpoints.newest
    fast = (
        config.fast_help
        and not _replays_beside(help.owner, found, assignment)
        and (newest is None or newest < found.target_version)  # one of the target can become complete
    )
    return replace(help, fast=fast)


def _replays_beside(rank: int, found: Plan, assignment: Assignment) -> bool:
    """Another rank that sends to this one, or is sent something by it, replays a step."""
    stages = assignment.stages[rank]
    beside = {
        other for stage in stages for other in (stage - 1, stage + 1) if 0 <= other < assignment.num_stages
    }
    owners = {owner for stage in beside for owner in assignment.holders(stage)} - {rank}
    return any(found.of(owner).from_version < found.target_version for owner in owners)


def _without_state(report: Report) -> Report:
    return replace(report, version=None, undo_to=None, forward_to=None, off_log=False)


def _words(found: Plan, kept: Sequence[int], fast: Sequence[int], *, log_ends: bool) -> list[str]:
    words = []
    if fast:
        words.append(f"not bit for bit: gradients of the replay of {_ranks(fast)} are added in another order")
    if others := sorted(set(kept) - set(fast)):
        words.append(f"not bit for bit: {_ranks(others)} came off the log in a fast replay")
    if log_ends:
        words.append(f"the log does not lead to version {found.target_version}, and begins anew")
    else:
        words.append(f"every rank saves version {found.target_version}, and the log ends there")
    return words


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
