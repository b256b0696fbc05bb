"""LogControl: what the coordinator asks of a log server. Calls block; the driver runs them in threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from swift.errors import (
    AccessDenied,
    JobSetApart,
    LogUnavailable,
    ServiceError,
    StaleGeneration,
    SwiftError,
    UnknownJob,
    UsageError,
)
from swift.log import admin
from swift.recovery import StreamSummary
from swift.security.channel import Credentials


class GenerationRefused(ServiceError):
    """The log server knows a higher generation of this job: asking again will not help."""

    address = ""


class Unfit(GenerationRefused):
    """The log server can do nothing for this job, and says so: its files there are damaged, or each answer is an
    error. Asking again will not help."""


class Answered(ServiceError):
    """The log server answered, and not what it was asked: it is not away."""


class JobForgotten(ServiceError):
    """A log server that held a generation of the job does not know it any more."""


class LogControl(Protocol):
    """One call to one log server. ServiceError: it did not answer; ask again. Unfit: that will not help."""

    def fence(self, address: str, job: str, generation: int, held: bool = False) -> None:
        """From now on it takes appends of `generation` only. Durable. GenerationRefused; JobForgotten if it is to have
        `held` one of the job before."""
        ...

    def trim(self, address: str, job: str, below_step: int) -> None:
        """It may drop the records of steps below `below_step`."""
        ...

    def reset(self, address: str, job: str, generation: int, number: int) -> None:
        """It drops every record of the job, once for each number of a generation, which it holds. GenerationRefused,
        JobForgotten."""
        ...

    def space(self, address: str, job: str, generation: int) -> admin.JobSpace:
        """How far the job is trimmed, and whether it must be trimmed further soon. Cheap."""
        ...

    def inventory(self, address: str, job: str) -> list[StreamSummary]:
        """What it has of every stream of the job; nothing of a job that it does not know."""
        ...


def check_address(address: str) -> None:
    """Of a log server that a caller names: this process would connect there, with a token that is good for every job.
    UsageError: it will not."""
    try:
        Credentials.from_environment().check_named(address)
    except UsageError as error:
        raise UsageError(f"the coordinator does not connect there: {error}") from None


class LogServers:
    """The log servers, over gRPC."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def fence(self, address: str, job: str, generation: int, held: bool = False) -> None:
        with _named_errors(address, job):
            admin.fence(address, job, generation, self._timeout_s, held=held)

    def trim(self, address: str, job: str, below_step: int) -> None:
        with _named_errors(address, job):
            admin.trim(address, job, below_step, self._timeout_s)

    def reset(self, address: str, job: str, generation: int, number: int) -> None:
        with _named_errors(address, job):
            admin.reset(address, job, generation, self._timeout_s, number=number)

    def space(self, address: str, job: str, generation: int) -> admin.JobSpace:
        with _named_errors(address, job):
            found = admin.space(address, job, generation, self._timeout_s)
            if found.apart:
                raise JobSetApart(found.apart)
            return found

    def inventory(self, address: str, job: str) -> list[StreamSummary]:
        with _named_errors(address, job):
            return [_summary(stream) for stream in admin.inventory(address, job, self._timeout_s)]


@contextmanager
def _named_errors(address: str, job: str) -> Iterator[None]:
    """What the log's client raises, as one of the errors of LogControl."""
    try:
        yield
    except StaleGeneration as error:
        raise GenerationRefused(
            f"log server {address} is ahead of this coordinator for job {job} ({error}): "
            "start the job under another name, or with an empty log"
        ) from error
    except UnknownJob as error:
        raise JobForgotten(f"log server {address}: {error}") from error
    except JobSetApart as error:
        raise Unfit(f"log server {address}: {error}") from error
    except (AccessDenied, LogUnavailable, Unfit):
        raise
    except SwiftError as error:
        where = "" if str(error).startswith("log server") else f"log server {address}: "
        raise Answered(f"{where}{error}") from error


def _summary(stream: admin.StreamInventory) -> StreamSummary:
    return StreamSummary(
        stream=stream.stream,
        records=stream.records,
        first_step=-1 if stream.first_step is None else stream.first_step,
        last_step=-1 if stream.last_step is None else stream.last_step,
        trimmed_below_step=stream.trimmed_below_step,
        corrupt=stream.corrupt,
        reason=stream.reason,
        unlogged=stream.unlogged,
        marks=stream.marks,
    )
