"""Slots that are vacant under a strategy that shrinks the world: the holder was lost, the others go on without it.

With "auto" and a `lost_shard` they wait for another process first, and go on without the rank once it is known that
none comes: its launcher has said so, or nobody has joined for a long time. From there on it is as with "shrink".

::

    (auto)        `give_up`: no process comes for the slot; `Awaited`: none has come
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

from services.coordinator.row import LACKS, JobRow, State, replicas_of
from swift.recovery import Assignment, Plan, RankMeasured, reroutes, worth_waiting_s
from swift.recovery import shrinks as strategy_shrinks


def shrinks(config: Mapping[str, str]) -> bool:
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
        left = f"nobody of its stage{' or of its pipeline' if _fetches(row) else ''} is left"
    return f"no process takes the place of rank {ranks}, and {left}"


def vacate(row: JobRow, dead: Iterable[int]) -> list[int]:
    """(before a new generation) The slots of the dead that become vacant: all, if a whole pipeline is left; else none,
    and the job goes on from its checkpoint with other processes."""
    dead = sorted(dead)
    left = {rank for rank, holder in row.holders.items() if rank not in dead and not holder.gone}
    if shrinks_late(row.config):
        dead, row.given_up = row.given_up, []
    elif not shrinks(row.config) or row.state is State.FORMING or not whole(row, left):
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


def settle(row: JobRow, version: int) -> None:
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
    if shrinks(config) or shrinks_late(config):
        return ""
    slots = [slot for slot, since in row.vacant.items() if since is None or since <= version]
    if not slots:
        return ""
    return f"it has no part of rank {slots[0]}, whose slot was vacant (--strategy shrink goes on from it)"


def whole(row: JobRow, left: set[int]) -> bool:
    """The job can go on with these slots: one data-parallel rank has all of its own; where microbatches are rerouted,
    each stage group has one, and each pipeline where its batches come from one of its ranks."""
    full = Assignment.grid(row.world_size, replicas=replicas_of(row.config))
    held = full.held_by({slot: slot for slot in left})
    if not reroutes_lost(row):
        return bool(held.whole_origins())
    return not (held.lost_stages() or (_fetches(row) and held.lost_origins()))


def reroutes_lost(row: JobRow) -> bool:
    """Peers of a lost rank share its microbatches."""
    return reroutes(row.config.get("strategy", ""), row.config.get("lost_shard", ""))


def _fetches(row: JobRow) -> bool:
    """The batches of a lost rank come from one of its pipeline."""
    return row.config.get("fetch_batches") == "True"


def _drops(row: JobRow) -> bool:
    return row.config.get("lost_shard") == "drop"


def _words(row: JobRow) -> str:
    slots = sorted(row.vacant)
    ranks = ", ".join(map(str, slots))
    if len(slots) == 1:
        return f"the slot of rank {ranks} is vacant, and nobody computes its batches"
    return f"the slots of ranks {ranks} are vacant, and nobody computes their batches"
