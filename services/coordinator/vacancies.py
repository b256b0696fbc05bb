"""Slots that are vacant under a strategy that shrinks the world: the holder was lost, the others go on without it.

::

    (a death)     `vacate`: the slot is vacant in the generation that follows
    (a plan)      `named`: if nobody computes the batches of that data-parallel rank (`lost_shard` "drop") it is not
                  exact, with that reason; so the log is given up, and the target saved
    (RUNNING)     `settle`: since that version
    (a Join)      `fill`: another process holds the slot, in a generation of its own; if nobody has computed its
                  batches, the log is given up again: what is logged of the step under way lacks its part

A checkpoint that was made while a slot was vacant has no part of it. Whoever holds the slot later loads the part of a
replica, which has the same state; that is a part of such a strategy, so it takes a job with one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from services.coordinator.row import JobRow, State
from swift.recovery import Plan
from swift.recovery import shrinks as strategy_shrinks


def shrinks(config: Mapping[str, str]) -> bool:
    """A job with this configuration goes on without a rank that is lost."""
    return strategy_shrinks(config.get("strategy", ""))


def vacate(row: JobRow, dead: Iterable[int]) -> list[int]:
    """(before a new generation) The slots of the dead that become vacant: all, if a whole pipeline is left; else none,
    and the job goes on from its checkpoint with other processes."""
    dead = sorted(dead)
    left = {rank for rank, holder in row.holders.items() if rank not in dead and not holder.gone}
    if not shrinks(row.config) or row.state is State.FORMING or not _whole(row, left):
        return []
    for slot in dead:
        row.vacant[slot] = None
        row.groups_from.pop(slot, None)
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


def settle(row: JobRow, version: int) -> None:
    """(RUNNING) Since this version, or an earlier one that was restored, they are vacant."""
    if _drops(row) and any(since is not None and since > version for since in row.vacant.values()):
        row.inexact_since = min(version, version if row.inexact_since is None else row.inexact_since)
    row.vacant = {
        slot: version if since is None else min(since, version) for slot, since in row.vacant.items()
    }


def lacking(row: JobRow, version: int, config: Mapping[str, str]) -> str:
    """Why a job with this configuration cannot begin with that checkpoint; empty: it can."""
    if shrinks(config):
        return ""
    slots = [slot for slot, since in row.vacant.items() if since is None or since <= version]
    if not slots:
        return ""
    return f"it has no part of rank {slots[0]}, whose slot was vacant (--strategy shrink goes on from it)"


def _whole(row: JobRow, left: set[int]) -> bool:
    """One data-parallel rank has all its slots."""
    replicas = int(row.config["replicas"])
    return any(left.issuperset(range(origin, row.world_size, replicas)) for origin in range(replicas))


def _drops(row: JobRow) -> bool:
    return row.config.get("lost_shard") == "drop"


def _words(row: JobRow) -> str:
    slots = sorted(row.vacant)
    ranks = ", ".join(map(str, slots))
    if len(slots) == 1:
        return f"the slot of rank {ranks} is vacant, and nobody computes its batches"
    return f"the slots of ranks {ranks} are vacant, and nobody computes their batches"
