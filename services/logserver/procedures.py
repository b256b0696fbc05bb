"""Fence, trim and reset as sequences of steps: what is decided, and what must be durable before it goes on.

A procedure is a generator. It runs while the server's lock is held; each step that it yields is done without it
(`Settle`, `Save`), and it goes on once that has been done. Where a step fails, the procedure ends there. One
procedure of a server runs at a time.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from services.logserver.core import JobState, Refusal, StreamState
from services.logserver.state import Refused, ServerState, check_names
from services.logserver.storage import JobMeta, StreamMeta
from swift.log.wire import Reason


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait until everything accepted so far is durable."""


@dataclass(frozen=True, slots=True)
class Save:
    """Make this the job's manifest, durably."""

    job: str
    meta: JobMeta


@dataclass(frozen=True, slots=True)
class Clean:
    """Some time: give back the space of what these streams have dropped."""

    streams: list[StreamState]


@dataclass(frozen=True, slots=True)
class Emit:
    """An event for the trace."""

    event: str
    fields: Mapping[str, object]


Step = Settle | Save | Clean | Emit
T = TypeVar("T")
Procedure = Generator[Step, None, T]


def fence(state: ServerState, job_name: str, generation: int) -> Procedure[None]:
    """Grants a generation; over when the grant, and all that older generations appended, is durable."""
    check_names(job_name)
    if generation == 0:
        raise Refused(Refusal(Reason.INVALID, "generation 0 cannot be granted; they start at 1"))
    state.check_job(job_name)
    refusal = state.core.fence(job_name, generation)
    if refusal is not None:
        raise Refused(refusal)
    job = state.core.job(job_name)
    # Writers of older generations are told now, not at their next frame.
    for session in state.sessions:
        for stream, opened_under in session.streams.values():
            if stream.job == job.name and opened_under < generation:
                session.end(state.core.check_generation(job, opened_under))
    yield Settle()
    yield Save(job_name, meta_of(job))
    yield Emit("fence", {"job": job_name, "generation": generation})


def trim(state: ServerState, job: JobState, below_step: int) -> Procedure[int]:
    """Gives the step below which everything is trimmed."""
    before = job.trimmed_below_step
    changed = state.core.trim(job, below_step)
    trimmed = job.trimmed_below_step
    if trimmed > before:
        yield Save(job.name, meta_of(job))
        yield Clean(changed)
        yield Emit("trimmed", {"job": job.name, "below_step": trimmed})
    return trimmed


def reset(state: ServerState, job_name: str, generation: int) -> Procedure[None]:
    """Drops every record of the job, under its granted generation; once, however late or often it is asked for."""
    check_names(job_name)
    state.check_job(job_name)
    job = state.core.job(job_name)
    refusal = state.core.check_generation(job, generation)
    if refusal is not None:
        raise Refused(refusal)
    if job.reset_generation == generation:
        return
    for session in state.sessions:
        if session.writes(job_name):
            session.end(Refusal(Reason.NOT_OPEN, f"job {job_name} was reset"))
    yield Settle()
    while any(stream.durable < stream.appended for stream in job.streams.values()):
        yield Settle()  # a writer came back meanwhile
    changed = state.core.reset(job)
    yield Save(job_name, replace(meta_of(job), reset_generation=generation))
    job.reset_generation = generation
    yield Clean(changed)
    yield Emit("reset", {"job": job_name, "generation": generation})


def meta_of(job: JobState) -> JobMeta:
    """What the job's manifest is to say."""
    return JobMeta(
        generation=job.generation,
        trimmed_below_step=job.trimmed_below_step,
        reset_generation=job.reset_generation,
        streams={
            name: StreamMeta(stream.first, stream.durable, stream.quarantined)
            for name, stream in job.streams.items()
        },
    )
