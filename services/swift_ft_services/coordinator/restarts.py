"""Restarts of a job that is over: a failed one continues from its newest complete checkpoint, a finished one from its
last version, with as many more steps as its trainer asks for.

::

    (launcher)  names itself in the Join of its ranks: `Join.run`
    (here)      a job that is over knows its launchers: a Join from one of them is late, and refused; another launcher
                is a new start. No rank holds any state then: FENCING, and the plan restores the newest checkpoint
                and empties the log; or FORMING, if no checkpoint is complete
    (a rank)    of a finished job, lost while it saves its files: its successor joins, loads the final checkpoint, and
                runs the code after `Session.run` again
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import ADOPTED, STARTED_AGAIN, optional
from swift_ft.planner import Refusals
from swift_ft_services.coordinator import planning
from swift_ft_services.coordinator.commands import Fenced, Invalid, Mismatch
from swift_ft_services.coordinator.endings import RUNS_KEPT
from swift_ft_services.coordinator.job_record import JobRow, LogServer, Origin, State

LASTING = {"replicas": "1", "shards": "1", "tensor_parallel": "1"}
"""Settings that determine a checkpoint's shards, and their defaults: they must be equal at a new start."""
CHANGE_NO_BITS = ("groups", "require_exact")
"""Settings that may differ at a new start: the job stays exact."""
KIND = {"communicator": "0"}
"""Setting that defines the kind of a job, and its default: it never changes."""


def first_row(job: str, log_servers: Sequence[LogServer], join: pb.JoinRequest, copies: int) -> JobRow:
    return JobRow(
        job=job,
        world_size=join.world_size,
        config=dict(join.config),
        fingerprint=dict(join.fingerprint),
        log_servers=list(log_servers),
        copies=copies,
        groups=join.config.get("groups", ""),
    )


def starts_again(row: JobRow, join: pb.JoinRequest) -> bool:
    """Returns whether the job is over and the Join is from a new launcher."""
    return row.state.is_over and bool(join.run) and join.run not in row.runs


def comes_back(row: JobRow, join: pb.JoinRequest) -> bool:
    """Returns whether the Join replaces a rank that was lost after the job had finished."""
    return row.state is State.FINISHED and row.final is not None and join.member.rank not in row.holders


def check_start(row: JobRow, join: pb.JoinRequest) -> None:
    """Raises Refusal if the checkpoints of the job do not fit the new start, or the process may not join."""
    if unlike := _unlike(row, join, KIND):
        name, before, now = unlike
        raise Mismatch(
            f"job {row.job} is over and cannot go on: its checkpoints are of {name} {before}, rank {join.member.rank} "
            f"says {now}: make them equal, or start it under another name"
        )
    newest = max(row.checkpoints, default=-1)
    if lacking := planning.lacking(row, newest, join.config):
        raise Mismatch(
            f"job {row.job} is over and cannot go on from its checkpoint of version {newest}: {lacking}; start it "
            "under another name"
        )
    if not 0 <= join.member.rank < row.world_size:
        raise Invalid(f"rank {join.member.rank} is not one of 0 to {row.world_size - 1}")
    if any(
        holder.incarnation == join.member.incarnation
        for holder in (*row.fenced.values(), *row.holders.values())
    ):
        raise Fenced(f"this process was rank {join.member.rank} before job {row.job} was over")


def note_run(row: JobRow, run: str, rank: int) -> None:
    if not run:
        return
    row.run_of[rank] = run
    if run in row.runs:
        return
    runs = [*row.runs, run]
    if len(runs) > RUNS_KEPT:
        there = set(row.run_of.values())  # a launcher that is removed here ends
        gone = [other for other in runs if other not in there]
        forgotten = set(gone[: len(runs) - RUNS_KEPT])
        runs = [other for other in runs if other not in forgotten]
    row.runs = runs


def note_stop(row: JobRow, run: str) -> bool:
    """Records that a launcher was asked to stop. Returns True if no launcher and no process of a rank is left."""
    row.run_of = {rank: other for rank, other in row.run_of.items() if other != run}
    return not row.run_of and all(holder.gone for holder in row.holders.values())


def begin_again(row: JobRow, join: pb.JoinRequest, log_servers: Sequence[LogServer]) -> str:
    """Applies the settings of `join` to the new start, whose log begins anew. Returns the changes as text."""
    changed = [
        f"{key} is {value_words(now, key)} instead of {value_words(before, key)}"
        for before, now in ((row.config, join.config), (row.fingerprint, join.fingerprint))
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and key not in CHANGE_NO_BITS
    ]
    ended = ended_words(row)
    own = row.origin.version if row.origin is not None and row.origin.job == row.job else 0
    begins = max(row.checkpoints, default=own)
    at = f"at version {begins}" if begins else "from its beginning"
    if row.checkpoints and changed and row.inexact_since is None:
        row.inexact_since, row.inexact_reason = max(row.checkpoints), f"started again: {'; '.join(changed)}"
    row.config, row.fingerprint = dict(join.config), dict(join.fingerprint)
    row.runs, row.run_of, row.exit_code, row.final = [], {}, 0, None
    if row.state is not State.FINISHED:
        row.end = None  # its trainer will call stop() again
    row.refused, row.distrusted, row.unloadable, row.differed = Refusals(), [], [], ""
    row.refusals, row.setbacks, row.exits = 0, 0, {}
    row.log_ends, row.checkpoint_at, row.checkpoint_reason = False, None, ""
    row.groups = join.config.get("groups", "")
    row.vacant, row.given_up, row.unlogged_below = {}, [], None
    row.rehearsals = {}
    if log_servers:
        row.log_servers = [replace(server, fresh=True) for server in log_servers]
        row.placement = {}
    return "; ".join([f"{STARTED_AGAIN} {at}: it {ended}", *changed])


def ended_words(row: JobRow) -> str:
    match row.state:
        case State.FINISHED:
            return "had finished"
        case State.STOPPED:
            return "was stopped"
    return f"had failed ({row.reason})"


def value_words(values: Mapping[str, str], key: str) -> str:
    return repr(values[key]) if key in values else "not set"


# A job that begins from the checkpoint of another job of the same coordinator.
#
# ::
#
#     (launcher)  --from-job NAME [--from-version V], which its ranks send in their Join
#     (driver)    the first Join of the job: `chosen` reads the other job's row; the result is stored in this job's row
#     (every rank, FORMING) loads its shard of that checkpoint, and saves it as this job's first one
#
# If the job is restarted or loses a rank before it has a checkpoint of its own, it begins from its origin again. After
# that it continues from its own checkpoints, and the other job no longer matters.


def wanted(row: JobRow | None, join: pb.JoinRequest) -> str:
    """Returns the job whose checkpoint must be chosen now; empty if none. `row`: None before the job exists."""
    if row is None:
        return join.from_job
    if row.checkpoints:
        return ""
    return join.from_job or (row.origin.job if row.origin is not None and row.origin.job != row.job else "")


def chosen(name: str, other_name: str, other: JobRow | None, join: pb.JoinRequest) -> Origin:
    """Returns the checkpoint that job `name` begins from. `other`: None if there is no such job, or the caller may not
    know of it. Raises Refusal if the job cannot begin from it."""
    if name == other_name:
        raise Mismatch(f"job {name} goes on from its own checkpoints: leave --from-job out")
    if other is None:
        raise Mismatch(
            f"--from-job {other_name}: this coordinator has no such job (swift-ft jobs lists them)"
        )
    if not other.checkpoints:
        raise Mismatch(f"--from-job {other_name}: no checkpoint of it is complete")
    if unlike := _unlike(other, join):
        what, theirs, ours = unlike
        raise Mismatch(
            f"--from-job {other_name}: its checkpoints are of {what} {theirs}, job {name} has {ours}: make them equal"
        )
    version = join.from_version if join.HasField("from_version") else max(other.checkpoints)
    if version not in other.checkpoints:
        there = " and ".join(map(str, other.checkpoints))
        raise Mismatch(
            f"--from-version {version}: the complete checkpoints of job {other_name} are of version {there}"
        )
    if lacking := planning.lacking(other, version, join.config):
        raise Mismatch(f"--from-job {other_name} --from-version {version}: {lacking}")
    inexact = other.inexact_since is not None and other.inexact_since <= version
    return Origin(job=other_name, version=version, inexact=other.inexact_reason if inexact else "")


# A job whose own checkpoints are there, and that the coordinator does not know: its state was lost.
#
# ::
#
#     (every rank)  marks of complete checkpoints (`swift_ft.state.complete_mark`), in its Join as `Found`
#     (launcher)    --from-checkpoints DIR: `Join.adopts`. Without it such a job is refused, never begun at version 0
#     (driver)      `adopted`: the origin is the job itself. It begins in a generation above all that there ever were,
#                   with emptied logs; then as from another job's checkpoint
#     (a rank)      cannot load it: Refuse; `step_back` takes the next older one

EPOCH = 1000
"""An adopted job begins at a generation above the next multiple of this: older processes may have acted in a few
generations of which no checkpoint tells."""


def adopted(name: str, row: JobRow | None, join: pb.JoinRequest) -> Origin | None:
    """Returns the checkpoint of its own with which a job without checkpoints here begins; None: there is none. `row`:
    None if the job is not known. Raises Refusal if it may not begin with it, or there is none and it should."""
    found, before = join.found, None if row is None else row.origin
    if not found.versions:
        if before is not None and before.job == name:
            return before
        if join.adopts and not join.from_job:
            why = found.problem or "none is complete"
            raise Mismatch(f"--from-checkpoints: there is no checkpoint of job {name} to go on from: {why}")
        return None
    newest, place = found.versions[-1], found.place
    if not join.adopts and not (before is not None and before.job == name):
        raise Mismatch(
            f"this coordinator does not know job {name}, and {place} has its checkpoint of step {newest}: to go on "
            f"there say --from-checkpoints {place}, to begin at step 0 give the job another name"
        )
    if unlike := _unlike(found, join):
        what, theirs, ours = unlike
        raise Mismatch(
            f"--from-checkpoints: the checkpoints in {place} are of {what} {theirs}, job {name} has {ours}: make them "
            "equal"
        )
    generation = max(found.generation, 0 if row is None else row.generation)
    return Origin(
        job=name,
        version=newest,
        inexact=found.inexact_reason or "it was not exact" if found.HasField("inexact_since") else "",
        older=tuple(found.versions[:-1]),
        generation=(generation // EPOCH + 1) * EPOCH,
        place=place,
    )


def adopted_words(origin: Origin) -> str:
    return (
        f"{ADOPTED} from {origin.place}: job {origin.job} goes on at step {origin.version}, with its checkpoint there, "
        "and its log begins anew"
    )


def step_back(row: JobRow) -> bool:
    """(FORMING) Takes the next older checkpoint in place of the adopted one, which cannot be loaded. Returns whether
    there is one."""
    origin = row.origin
    if origin is None or origin.job != row.job or not origin.older:
        return False
    row.origin = replace(origin, version=origin.older[-1], older=origin.older[:-1])
    row.inexact_since = None if row.inexact_since is None else row.origin.version
    return True


def begin_at_checkpoint(row: JobRow, origin: Origin | None) -> None:
    """(a job without a checkpoint of its own begins) Begins from `origin`, or at version 0 if it is None."""
    row.origin = origin
    row.inexact_since, row.inexact_reason = None, ""
    if origin is not None and origin.job == row.job:
        row.generation = max(row.generation, origin.generation + 1)
        row.reason = adopted_words(origin)
        row.log_servers = [replace(server, fresh=True) for server in row.log_servers]
    if origin is not None and origin.inexact:
        row.inexact_since = origin.version
        whose = "" if origin.job == row.job else f"job {origin.job}, with whose checkpoint it began: "
        row.inexact_reason = f"{whose}{origin.inexact}"


def check_origin(row: JobRow, join: pb.JoinRequest) -> None:
    """Raises Refusal if the rank asks for another origin than the job's. A rank that asks for none accepts it."""
    if not join.from_job:
        return
    origin = row.origin
    version = optional(join, "from_version")
    if origin is not None and origin.job == join.from_job and version in (None, origin.version):
        return
    began = "at step 0" if origin is None else f"with version {origin.version} of job {origin.job}"
    asked = join.from_job if version is None else f"{join.from_job} --from-version {version}"
    raise Mismatch(
        f"rank {join.member.rank} says --from-job {asked}, and job {row.job} began {began}: say the same, leave it "
        "out, or give the job another name"
    )


def _unlike(
    row: JobRow | pb.Found, join: pb.JoinRequest, more: Mapping[str, str] | None = None
) -> tuple[str, str, str] | None:
    """Returns the first lasting setting, also of `more`, that differs: its name and values in `row` and `join`."""
    wanted = [("world size", str(row.world_size), str(join.world_size))]
    usual = {**LASTING, **(more or {})}
    wanted += [(key, row.config.get(key, no), join.config.get(key, no)) for key, no in usual.items()]
    return next((one for one in wanted if one[1] != one[2]), None)
