"""Slots that are left vacant: their holder was lost, and the job goes on without another one.

::

    (a death)     `vacate`: the slot is vacant in the generation that follows; a process that comes for it is refused.
                  Nobody computes the batches of its data-parallel rank any more
    (a plan)      `named`: not exact, with that reason; so the log is given up, and the target saved
    (RUNNING)     `settle`: since that version

A slot that is vacant stays so: what its checkpoints lack is not made again, and a job with one cannot be started again.
Done only for jobs that ask for it (`swift.names.leaves_vacant`), which are replicas of one stage.
"""

from collections.abc import Iterable
from dataclasses import replace

from services.coordinator.row import JobRow, State
from swift.recovery import Plan

CONFIG = "leave_vacant"
"""The entry of a job's configuration."""


def vacate(row: JobRow, dead: Iterable[int]) -> list[int]:
    """(before a new generation) The slots of the dead that become vacant: all, if somebody is left; else none, and the
    job goes on from its checkpoint with other processes."""
    dead = sorted(dead)
    left = [rank for rank, holder in row.holders.items() if rank not in dead and not holder.gone]
    if row.config.get(CONFIG) != "1" or row.state is State.FORMING or not left:
        return []
    for slot in dead:
        row.vacant[slot] = None
        row.groups_from.pop(slot, None)
    if dead:
        row.shards = {}  # nothing that lacks a part of this slot, and was begun with it, becomes complete
        row.rolled_back_in = row.generation + 1
    return dead


def named(row: JobRow, plan: Plan) -> Plan:
    """The plan, if slots have become vacant since the job last ran: not exact."""
    new = [slot for slot, since in row.vacant.items() if since is None]
    earlier = [since for since in row.vacant.values() if since is not None and since > plan.target_version]
    if not (new or earlier):
        return plan
    return replace(plan, exact=False, reason=f"{plan.reason}; not exact: {_words(row)}")


def settle(row: JobRow, version: int) -> None:
    """(RUNNING) Since this version, or an earlier one that was restored, they are vacant."""
    if any(since is not None and since > version for since in row.vacant.values()):
        row.inexact_since = min(version, version if row.inexact_since is None else row.inexact_since)
    row.vacant = {
        slot: version if since is None else min(since, version) for slot, since in row.vacant.items()
    }


def gone_for_good(row: JobRow, version: int) -> str:
    """Why a checkpoint of this version lacks a part of the state; empty: it has all."""
    lacking = [slot for slot, since in row.vacant.items() if since is None or since <= version]
    if not lacking:
        return ""
    return f"it has no part of rank {lacking[0]}, whose slot was left vacant before"


def _words(row: JobRow) -> str:
    slots = sorted(row.vacant)
    ranks = ", ".join(map(str, slots))
    if len(slots) == 1:
        return f"the slot of rank {ranks} is vacant, and nobody computes its batches"
    return f"the slots of ranks {ranks} are vacant, and nobody computes their batches"
