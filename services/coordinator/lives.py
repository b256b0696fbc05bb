"""A job that is over, started again: what failed goes on at its newest complete checkpoint, what has finished at its
last version, with as many steps more as its trainer asks for.

::

    (launcher)  names itself in the Join of its ranks: `Join.run`
    (here)      a job that is over knows the launchers that it had: one of theirs is late, and refused; another one is
                a new start. Nobody holds any state then: FENCING, and the plan restores the newest checkpoint and
                empties the log; or FORMING, if the job had not come so far
    (a rank)    of a job that has finished, lost while it saves its files: its successor joins, loads the final
                checkpoint, and does what comes after `Session.run` again
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.coordinator import commands as m
from services.coordinator import vacancies
from services.coordinator.commands import Refusal, Refused
from services.coordinator.row import JobRow, LogServer, State
from services.coordinator.setbacks import RUNS_KEPT
from swift.recovery import Refusals
from swift.views import STARTED_AGAIN

LASTING = ("replicas", "shards")
"""What a checkpoint's shards were made by: a new start cannot have it otherwise."""
KINDS = ("communicator",)
"""What a job is for good."""


def first_row(job: str, log_servers: Sequence[LogServer], join: m.Join, copies: int) -> JobRow:
    """What the Join that makes a job begins with."""
    return JobRow(
        job=job,
        world_size=join.world_size,
        config=dict(join.config),
        fingerprint=dict(join.fingerprint),
        log_servers=list(log_servers),
        copies=copies,
        groups=join.config.get("groups", ""),
    )


def starts_again(row: JobRow, join: m.Join) -> bool:
    """A launcher that this job, which is over, has not had."""
    return row.state.is_over and bool(join.run) and join.run not in row.runs


def comes_back(row: JobRow, join: m.Join) -> bool:
    """It is there for a rank that was lost after the job had finished."""
    return row.state is State.FINISHED and row.final is not None and join.rank not in row.holders


def check_start(row: JobRow, join: m.Join) -> None:
    """Refusal: it is not the job that its checkpoints are of."""
    wanted = [("world size", str(row.world_size), str(join.world_size))]
    wanted += [(key, row.config.get(key, "1"), join.config.get(key, "1")) for key in LASTING]
    wanted += [(key, row.config.get(key, "0"), join.config.get(key, "0")) for key in KINDS]
    for name, before, now in wanted:
        if before != now:
            raise Refusal(
                Refused.MISMATCH,
                f"job {row.job} is over and cannot go on: its checkpoints are of {name} {before}, rank {join.rank} "
                f"says {now}: make them equal, or start it under another name",
            )
    newest = max(row.checkpoints, default=-1)
    if lacking := vacancies.lacking(row, newest, join.config):
        raise Refusal(
            Refused.MISMATCH,
            f"job {row.job} is over and cannot go on from its checkpoint of version {newest}: {lacking}; start it "
            "under another name",
        )
    if not 0 <= join.rank < row.world_size:
        raise Refusal(Refused.INVALID, f"rank {join.rank} is not one of 0 to {row.world_size - 1}")
    if any(holder.incarnation == join.incarnation for holder in (*row.fenced, *row.holders.values())):
        raise Refusal(Refused.FENCED, f"this process was rank {join.rank} before job {row.job} was over")


def note_run(row: JobRow, run: str, rank: int) -> None:
    """A rank has joined that this launcher has started."""
    if not run:
        return
    row.run_of[rank] = run
    if run in row.runs:
        return
    runs = [*row.runs, run]
    if len(runs) > RUNS_KEPT:
        there = set(row.run_of.values())  # a launcher that is not named any more ends
        gone = [other for other in runs if other not in there]
        forgotten = set(gone[: len(runs) - RUNS_KEPT])
        runs = [other for other in runs if other not in forgotten]
    row.runs = runs


def note_stop(row: JobRow, run: str) -> bool:
    """That launcher was told to stop. True: so were all that had one of the last ranks, and none is left."""
    row.run_of = {rank: other for rank, other in row.run_of.items() if other != run}
    return not row.run_of and all(holder.gone for holder in row.holders.values())


def begin_again(row: JobRow, join: m.Join, log_servers: Sequence[LogServer]) -> str:
    """The new start takes the settings of `join`, and its log begins anew. Returns the changes, for people."""
    changed = [
        f"{key} is {_value(now, key)} instead of {_value(before, key)}"
        for before, now in ((row.config, join.config), (row.fingerprint, join.fingerprint))
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    ended = ended_words(row)
    at = f"at version {max(row.checkpoints)}" if row.checkpoints else "from its beginning"
    if row.checkpoints and changed and row.inexact_since is None:
        row.inexact_since, row.inexact_reason = max(row.checkpoints), f"started again: {'; '.join(changed)}"
    row.config, row.fingerprint = dict(join.config), dict(join.fingerprint)
    row.runs, row.run_of, row.exit_code, row.final = [], {}, 0, None
    if row.state is not State.FINISHED:
        row.end = None  # its trainer will come to it again
    row.refused, row.distrusted, row.unloadable, row.differed = Refusals(), [], [], ""
    row.refusals, row.setbacks, row.exits = 0, 0, {}
    row.log_ends, row.off_log, row.checkpoint_at, row.checkpoint_reason = False, [], None, ""
    row.groups, row.groups_since = join.config.get("groups", ""), 0
    row.groups_next, row.groups_from = "", {}
    row.vacant, row.given_up, row.unlogged_below, row.move = {}, [], None, []
    if log_servers:
        row.log_servers = [replace(server, fresh=True) for server in log_servers]
        row.placement = {}
    return "; ".join([f"{STARTED_AGAIN} {at}: it {ended}", *changed])


def ended_words(row: JobRow) -> str:
    """Of a job that is over: it ..."""
    match row.state:
        case State.FINISHED:
            return "had finished"
        case State.STOPPED:
            return "was stopped"
    return f"had failed ({row.reason})"


def _value(values: Mapping[str, str], key: str) -> str:
    return repr(values[key]) if key in values else "not set"
