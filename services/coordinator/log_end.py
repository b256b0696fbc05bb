"""A job whose state is not what its log leads to: a checkpoint of it at once, and the log begins anew behind that.

::

    (planner)     a rank reports that it is off the log (swift.recovery.off_log): `Plan.saves`
    (every rank)  at the target: saves it, CheckpointDurable, Ready; who came off the log says so
    (here)        the checkpoint is complete: `JobRow.log_ends`. Whatever happens from now on, the log goes
    (here)        all are Ready: another generation instead of RUNNING
    (planner)     everybody keeps what it holds, or loads that checkpoint; the log is given up
    (core)        the logs are emptied, RECOVERING, all are Ready again, RUNNING

Until the checkpoint is complete, the one before it and the log stand behind the job as they were: nothing of what
came off the log is in there. So whoever is lost meanwhile is replayed from them, and at worst all restore.
"""

from services.coordinator import commands as m
from services.coordinator.row import JobRow, State


def is_ready(row: JobRow, ready: m.Ready) -> None:
    row.ready[ready.sender.rank] = ready.version
    if ready.off_log:
        row.off_log = sorted({*row.off_log, ready.sender.rank})


def is_saved(row: JobRow, version: int) -> bool:
    """This checkpoint is the one that the log ends with. Perhaps nobody came off the log, which who died may not have
    said: giving it up is right all the same."""
    return _saves(row) and row.plan is not None and version == row.plan.target_version


def ends_next(row: JobRow) -> str:
    """(all are ready) Why the job does not run yet; empty: it does."""
    if not _saves(row):
        return ""
    if not row.off_log:
        row.log_ends = False  # the replays were exact after all
        return ""
    names = ", ".join(map(str, row.off_log))
    target = max(row.ready.values())
    if row.log_ends:
        return f"the checkpoint of version {target} is complete: the log, which rank {names} has left, begins anew"
    # All have said that they have saved it. If that is not so, the log is what is left: replay from it, exactly.
    why = f"no checkpoint of version {target} came about, and rank {names} has left the log"
    row.refused = row.refused.and_help(why)
    return why


def leave_recovering(row: JobRow) -> None:
    """(a new generation) What was saved of a version that never became complete may be of another history."""
    if _saves(row) and not row.log_ends:
        row.rolled_back_in = row.generation + 1
        row.shards = {}
    row.off_log = []


def _saves(row: JobRow) -> bool:
    return row.state is State.RECOVERING and row.plan is not None and row.plan.saves
