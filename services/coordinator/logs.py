"""LogControl: what the coordinator asks of a log server. Calls block; the driver runs them in threads."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from swift.errors import ServiceError
from swift.recovery import StreamSummary


class GenerationRefused(ServiceError):
    """The log server knows a higher generation of this job: asking again will not help."""


class LogControl(Protocol):
    """One call to one log server. ServiceError: it did not answer; ask again."""

    def fence(self, address: str, job: str, generation: int) -> None:
        """From now on it takes appends of `generation` only. Durable. GenerationRefused."""
        ...

    def trim(self, address: str, job: str, below_step: int) -> None:
        """It may drop the records of steps below `below_step`."""
        ...

    def reset(self, address: str, job: str, generation: int) -> None:
        """It drops every record of the job. GenerationRefused."""
        ...

    def inventory(self, address: str, job: str) -> list[StreamSummary]:
        """What it has of every stream of the job."""
        ...


class NoLogs:
    """A log server that holds nothing and answers at once: for tests of the coordinator alone."""

    def fence(self, address: str, job: str, generation: int) -> None:
        pass

    def trim(self, address: str, job: str, below_step: int) -> None:
        pass

    def reset(self, address: str, job: str, generation: int) -> None:
        pass

    def inventory(self, address: str, job: str) -> list[StreamSummary]:
        return []


def merged(inventories: Iterable[Iterable[StreamSummary]]) -> Mapping[str, StreamSummary]:
    """By stream name. Of a stream that two servers have, the one with less: a plan must not count on more."""
    streams: dict[str, StreamSummary] = {}
    for inventory in inventories:
        for summary in inventory:
            known = streams.get(summary.stream)
            if known is None or _worth(summary) < _worth(known):
                streams[summary.stream] = summary
    return streams


def _worth(summary: StreamSummary) -> tuple[bool, int, int]:
    return (not summary.corrupt, summary.last_step, -summary.first_step)
