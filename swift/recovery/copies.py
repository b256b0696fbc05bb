"""One stream on several log servers: what its copies hold together, and which of them to read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift.recovery.types import StreamSummary


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCopy:
    """What one log server has of a stream."""

    server: int
    summary: StreamSummary
    whole_from: int | None = 0
    """It was written there from this step on. None: only since the recovery under way, so no step of it counts."""


def combined(
    copies: Sequence[StreamCopy], *, floor: int = 0, lost: str = ""
) -> tuple[StreamSummary, tuple[int, ...]]:
    """The stream as a plan may count on it, and the servers to read, the best first.

    Copies are written together, record by record, each from the step on at which its server came to the stream; so
    the one that begins first has what the others have, unless it is damaged. Those that begin as early are as good,
    and go on where it fails. Nobody needs steps below `floor`. `lost`: why older records are gone, if they are.
    At least one copy.
    """
    sound = [copy for copy in copies if not copy.summary.corrupt and _begins(copy) is not None]
    servers = tuple(copy.server for copy in copies)
    trimmed = min(copy.summary.trimmed_below_step for copy in copies)
    # Of all: one may not have got that far, and what is written again goes to those that count for nothing yet, too.
    declared = [copy.summary.unlogged for copy in copies if copy.summary.unlogged is not None]
    unlogged = (min(u[0] for u in declared), max(u[1] for u in declared)) if declared else None
    if not sound:
        damaged = [c for c in copies if c.summary.corrupt and c.whole_from is not None]
        if damaged:
            return damaged[0].summary, servers
        empty = StreamSummary(
            stream=copies[0].summary.stream,
            records=0,
            trimmed_below_step=trimmed,
            reason=lost,
            unlogged=unlogged,
        )
        return empty, servers
    start = min(max(_begins(copy) or 0, floor) for copy in sound)
    chosen = [copy for copy in sound if max(_begins(copy) or 0, floor) == start]
    chosen.sort(key=lambda copy: (-copy.summary.last_step, -copy.summary.records))
    first = min(_begins(copy) or 0 for copy in chosen)
    best = chosen[0].summary
    whole = replace(
        best,
        first_step=first,
        last_step=max(best.last_step, first),
        trimmed_below_step=min(copy.summary.trimmed_below_step for copy in chosen),
        reason=lost if first > floor else "",
        unlogged=unlogged,
    )
    return whole, tuple(copy.server for copy in chosen)


def _begins(copy: StreamCopy) -> int | None:
    """The first step that it has whole; None: it has none."""
    summary = copy.summary
    if copy.whole_from is None or not summary.records or summary.last_step < copy.whole_from:
        return None
    return max(summary.first_step, copy.whole_from)
