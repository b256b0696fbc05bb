"""Generations without progress: every way to loop ends within a bound, with its reason.

Progress is a version that no rank had before, on all ranks of a job that runs. A rank that refuses, a connection that
breaks while everybody lives, a log server that forgets: each makes a generation, and the same may come again after it.
So these are counted until there is progress, however often the job has run meanwhile. Deaths from outside are not: a
launcher has a limit of its own (--max-restarts). But a process that ends by itself, again and again before a new
version, is its trainer's doing.
"""

import signal

from services.coordinator.messages_text import exit_words
from services.coordinator.row import JobRow, State
from services.coordinator.step_watchdog import StepClock

REFUSALS_MAX = 8
"""Generations without a death and without a new version. The next one ends the job."""
EXITS_MAX = 3
"""Processes of one rank that end by themselves without a new version. The last of them ends the job."""
RUNS_KEPT = 1024
_OWN_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
    | {signal.SIGINT}  # with which Python ends for a KeyboardInterrupt that nobody has caught
)


class Setbacks:
    """Changes the row; its caller makes that durable."""

    def __init__(self, row: JobRow, steps: StepClock) -> None:
        self._row = row
        self._steps = steps

    def begin_generation(self) -> None:
        row = self._row
        known = [self._steps.version(rank) for rank in row.holders]
        row.reached = max([row.reached, *known, *row.ready.values(), *row.checkpoints])
        row.setbacks += 1

    def made_progress(self) -> bool:
        """(a rank has told its version, or a checkpoint is complete) True: all have come to a new one, and this was not
        known. Steps may be so short that a rank dies before it has told any version: all have had what is saved."""
        row = self._row
        if row.state is not State.RUNNING or not (row.setbacks or row.refusals or row.exits):
            return False
        saved = max(row.checkpoints, default=0)
        if any(max(self._steps.version(rank), saved) <= row.reached for rank in row.slots()):
            return False
        row.setbacks, row.refusals, row.exits = 0, 0, {}
        return True

    def refuse(self, what: str) -> str:
        """Another generation in which nobody has died. Why there is none; empty: there is."""
        row = self._row
        row.refusals += 1
        if row.refusals <= REFUSALS_MAX:
            return ""
        ends = f"{what} (no. {row.refusals} in a row without a version above {row.reached})"
        if row.inexact_since is None:
            return ends
        # Where bits differ again and again, this is why, and what its author can do.
        return f"{ends}; not exact since version {row.inexact_since}: {row.inexact_reason}"

    def exit(self, rank: int, code: int) -> str:
        """A process of that rank has ended. Why the job ends with it; empty: it does not."""
        if code <= 0 and -code not in _OWN_SIGNALS:
            return ""
        codes = self._row.exits[rank] = [*self._row.exits.get(rank, ()), code]
        if len(codes) < EXITS_MAX:
            return ""
        at = max(self._row.reached, self._steps.version(rank))
        return f"rank {rank} {exit_words(code)}, {len(codes)} times without a version above {at}"


def launcher_code(code: int) -> int:
    """What a launcher ends with, as a shell would: 128 and the signal."""
    return code if code >= 0 else 128 - code
