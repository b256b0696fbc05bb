"""Fence, trim, reset and drop as sequences of steps: each decision, and what must be durable before the next one.

A procedure is a generator. It runs while the server's lock is held. Each step that it yields (`Settle`, `Save`) is
executed without the lock, and then the procedure continues. If a step fails, Refused is thrown into the procedure,
which ends it. A server runs one procedure at a time.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from swift_ft.log.directory import LIVES_S
from swift_ft.log.manifest import JobMeta, StreamMeta
from swift_ft.log.protocol import Reason
from swift_ft.log.record import STEP_MAX
from swift_ft_services.logserver.core import (
    SWEPT_AT_ONCE,
    JobState,
    Refusal,
    Refused,
    StreamState,
    check_number,
    fenced,
)
from swift_ft_services.logserver.quotas import Notice
from swift_ft_services.logserver.state import ServerState, check_names


@dataclass(frozen=True, slots=True)
class Settle:
    """Step: wait until all accepted records of the job are durable."""

    job: str


@dataclass(frozen=True, slots=True)
class Save:
    """Step: durably replace the job's manifest."""

    job: str
    meta: JobMeta


@dataclass(frozen=True, slots=True)
class Clean:
    """Deferred step: free the space of what these streams have dropped."""

    streams: list[StreamState]


@dataclass(frozen=True, slots=True)
class Forget:
    """Step: durably forget the job; its space is freed later."""

    job: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Step: release the lock for others. ``garbage`` may be emptied meanwhile, piece by piece."""

    garbage: "list[dict[Any, Any]]" = field(default_factory=list)


# A `Notice` is a step as well: it is emitted.
Step = Settle | Save | Clean | Forget | Notice | Rest
T = TypeVar("T")
Procedure = Generator[Step, None, T]


def fence(
    state: ServerState, job_name: str, generation: int, now: float, *, held: bool = False
) -> Procedure[None]:
    """Grants a generation. Ends when the grant and all appends of older generations are durable (except for streams
    that are never synced). ``held``: grants only to a job that is known here. Raises Refused for generation 0, for one
    older than the granted one, and for a quarantined job."""
    check_names(job_name)
    state.check_apart(job_name)
    if generation == 0:
        raise Refused(Reason.INVALID, "generation 0 cannot be granted; they start at 1")
    if held:
        _check_known(state, job_name)
    state.check_job(job_name)
    is_new = generation > state.core.generation_of(job_name)
    state.core.fence(job_name, generation)
    job = state.core.job(job_name)
    state.touch(job_name, now)
    if is_new:
        # No write is accepted under it before it is durable; if saving fails, not before another fence.
        words = f"generation {generation} of job {job_name} is not durable yet"
        state.cut_off[job_name] = Refusal(Reason.NOT_GRANTED, words)
    # Writers of older generations are refused now, not at their next frame.
    for session in state.writers.get(job_name, ()):
        opened_under = session.oldest[job_name]
        if opened_under < generation:
            session.end(fenced(job, opened_under))
    yield Settle(job_name)
    yield Save(job_name, meta_of(job))
    state.cut_off.pop(job_name, None)
    yield Notice("fence", {"job": job_name, "generation": generation})


def trim(state: ServerState, job: JobState, below_step: int, generation: int = 0) -> Procedure[int]:
    """Trims, and returns the step below which everything is durably trimmed. ``generation``: in which it was asked for;
    0: any. Raises Refused for another one than the granted one, and for a step out of range."""
    if state.core.jobs.get(job.name) is not job:
        return job.trimmed_below_step  # dropped meanwhile
    check_number("step", below_step, STEP_MAX)
    if generation:  # a late request would trim steps that have come again since a reset
        state.core.check_generation(job, generation)
    if state.core.begin_trim(job, below_step):
        yield from _sweep(state, job)
        state.space.recount(state.core)
    trimmed = job.trimmed_below_step
    if trimmed > job.trim_recorded:
        yield Save(job.name, meta_of(job))
        job.trim_recorded = trimmed
        changed, job.uncleaned = list(job.uncleaned.values()), {}
        yield Clean(changed)
        yield Notice("trimmed", {"job": job.name, "below_step": trimmed})
    return trimmed


def _sweep(state: ServerState, job: JobState) -> Procedure[None]:
    """Sweeps in pieces: records are appended and read between them, so a large job blocks no other."""
    looked = 0
    for stream in list(job.streams.values()):
        sequence: int | None = 0
        while sequence is not None:
            sequence = state.core.sweep(job, stream, sequence, SWEPT_AT_ONCE)
            looked += SWEPT_AT_ONCE if sequence is not None else 1
            if looked >= SWEPT_AT_ONCE:
                looked = 0
                yield Rest()
        if state.core.end_trim(job, stream):
            job.uncleaned[stream.name] = stream


def reset(state: ServerState, job_name: str, generation: int, number: int = 0) -> Procedure[None]:
    """Drops every record of the job, under its granted generation. Repeated or late requests have no effect. ``number``
    counts the resets of one generation. Raises Refused for another generation than the granted one."""
    check_names(job_name)
    state.check_apart(job_name)
    job = _check_known(state, job_name)
    state.core.check_generation(job, generation)
    if (job.reset_generation, job.reset_number) >= (generation, number):
        return
    with _cut_off(state, job, Refusal(Reason.NOT_OPEN, f"job {job_name} was reset")):
        yield Settle(job_name)
        changed = state.core.reset(job)
        state.space.recount(state.core)
        # It ends the open segments: a record that came earlier would share one with those that are dropped.
        yield Save(job_name, replace(meta_of(job), reset_generation=generation, reset_number=number))
        job.reset_generation, job.reset_number = generation, number
    yield Clean(changed)
    yield from _free(state)
    yield Notice("reset", {"job": job_name, "generation": generation})


def _free(state: ServerState) -> Procedure[None]:
    garbage = state.core.take_garbage()
    if garbage:
        yield Rest(garbage)


def _check_known(state: ServerState, job_name: str) -> JobState:
    job = state.core.jobs.get(job_name)
    if job is None:
        # Does not list the existing jobs: the caller may have access to one job only.
        raise Refused(Reason.UNKNOWN, f"there is no job {job_name} here")
    return job


def drop(
    state: ServerState, job_name: str, now: float, *, force: bool, why: str
) -> Procedure[tuple[int, int]]:
    """Forgets a job. Returns (records, bytes). A job in use is refused, unless ``force`` is set: then its writers are
    cut off, and their generation is no longer granted."""
    check_names(job_name)
    if job_name in state.apart:
        yield Forget(job_name)
        del state.apart[job_name]
        state.cut_off.pop(job_name, None)
        yield Notice("dropped", {"job": job_name, "records": 0, "bytes": 0, "reason": why})
        return 0, 0
    job = _check_droppable(state, job_name, now, force)
    with _cut_off(state, job, Refusal(Reason.NOT_GRANTED, f"job {job_name} was dropped")):
        yield Settle(job_name)
    records, size = job.tally.records, job.tally.bytes
    del state.core.jobs[job_name]  # before its files: no write reaches them from here on
    state.space.recount(state.core)
    try:
        yield Forget(job_name)
    except Refused:
        state.core.jobs[job_name] = job
        state.space.recount(state.core)
        raise
    state.cut_off.pop(job_name, None)
    state.touched.pop(job_name, None)
    for stream in job.streams.values():
        state.core.empty(stream)
    yield from _free(state)
    yield Notice("dropped", {"job": job_name, "records": records, "bytes": size, "reason": why})
    return records, size


def _check_droppable(state: ServerState, job_name: str, now: float, force: bool) -> JobState:
    job = _check_known(state, job_name)
    idle_s = state.idle_s(job_name, now) or 0.0
    if idle_s < LIVES_S and not force:
        raise Refused(
            Reason.LIVES,
            f"job {job_name} was last spoken for {idle_s:.0f} s ago (generation {job.generation}): end it, "
            f"wait {LIVES_S - idle_s:.0f} s, then drop it; or force it",
        )
    return job


@contextmanager
def _cut_off(state: ServerState, job: JobState, why: Refusal) -> Iterator[None]:
    """Ends the job's writers, and admits no new ones within."""
    for session in state.writers.get(job.name, ()):
        session.end(why)
    before = state.cut_off.get(job.name)
    state.cut_off[job.name] = why
    try:
        yield
    finally:
        if before is None:
            del state.cut_off[job.name]
        else:
            state.cut_off[job.name] = before


def meta_of(job: JobState) -> JobMeta:
    """Returns the contents of the job's manifest."""
    return JobMeta(
        generation=job.generation,
        trimmed_below_step=job.trimmed_below_step,
        reset_generation=job.reset_generation,
        reset_number=job.reset_number,
        streams={
            name: StreamMeta(stream.first, stream.durable, stream.quarantined)
            for name, stream in job.streams.items()
        },
    )
