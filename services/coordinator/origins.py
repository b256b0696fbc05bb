"""A job that begins with the checkpoint of another one, of the same coordinator.

::

    (launcher)  --from-job NAME [--from-version V], which its ranks say in their Join
    (driver)    the first Join of the job: `chosen` looks at the other one's row; from then on it is in this job's own
    (every rank, FORMING) loads its part of that checkpoint, and saves it as this job's first one

Until the job runs it has nothing but its origin: if it is started again, or loses a rank, before that, it begins there
again. After that it goes on from its own checkpoints, and the other one matters no more.
"""

from services.coordinator import commands as m
from services.coordinator import vacancies
from services.coordinator.commands import Refusal, Refused
from services.coordinator.lives import LASTING
from services.coordinator.row import JobRow, Origin


def wanted(row: JobRow | None, join: m.Join) -> str:
    """The job whose checkpoint is to be chosen now; empty: none is. `row`: None before the job has any."""
    if row is None:
        return join.from_job
    if row.checkpoints:
        return ""
    return join.from_job or (row.origin.job if row.origin is not None else "")


def chosen(name: str, other_name: str, other: JobRow | None, join: m.Join) -> Origin:
    """What job `name` begins with. `other`: None if there is none, or none that the caller may know of. Refusal: it
    cannot."""
    if name == other_name:
        raise _refusal(f"job {name} goes on from its own checkpoints: leave --from-job out")
    if other is None:
        raise _refusal(
            f"--from-job {other_name}: this coordinator has no such job (swift-ft jobs lists them)"
        )
    if not other.checkpoints:
        raise _refusal(f"--from-job {other_name}: no checkpoint of it is complete")
    wanted = [("world size", str(other.world_size), str(join.world_size))]
    wanted += [(key, other.config.get(key, "1"), join.config.get(key, "1")) for key in LASTING]
    for what, theirs, ours in wanted:
        if theirs != ours:
            raise _refusal(
                f"--from-job {other_name}: its checkpoints are of {what} {theirs}, job {name} has {ours}: "
                "make them equal"
            )
    version = max(other.checkpoints) if join.from_version is None else join.from_version
    if version not in other.checkpoints:
        there = " and ".join(map(str, other.checkpoints))
        raise _refusal(
            f"--from-version {version}: the complete checkpoints of job {other_name} are of version {there}"
        )
    if lacking := vacancies.lacking(other, version, join.config):
        raise _refusal(f"--from-job {other_name} --from-version {version}: {lacking}")
    inexact = other.inexact_since is not None and other.inexact_since <= version
    return Origin(job=other_name, version=version, inexact=other.inexact_reason if inexact else "")


def begin(row: JobRow, origin: Origin | None) -> None:
    """(a job without a checkpoint of its own begins) From there, or at version 0."""
    row.origin = origin
    row.inexact_since, row.inexact_reason = None, ""
    if origin is not None and origin.inexact:
        row.inexact_since = origin.version
        row.inexact_reason = f"job {origin.job}, with whose checkpoint it began: {origin.inexact}"


def check_origin(row: JobRow, join: m.Join) -> None:
    """Refusal: the job has begun otherwise than this rank was told. Who was told nothing goes by the job."""
    if not join.from_job:
        return
    origin = row.origin
    same = origin is not None and origin.job == join.from_job
    if same and join.from_version in (None, origin.version if origin is not None else None):
        return
    began = "at step 0" if origin is None else f"with version {origin.version} of job {origin.job}"
    asked = (
        join.from_job if join.from_version is None else f"{join.from_job} --from-version {join.from_version}"
    )
    raise _refusal(
        f"rank {join.rank} says --from-job {asked}, and job {row.job} began {began}: say the same, leave it out, or "
        "give the job another name"
    )


def _refusal(words: str) -> Refusal:
    return Refusal(Refused.MISMATCH, words)
