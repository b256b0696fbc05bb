"""Endings: a job that its trainer ends, and a job without progress.

Generations without progress: the number of repetitions is bounded, and the job ends with the reason.

Progress is a version that no rank had before, reached by all ranks of a running job. A refusal by a rank, a connection
lost while all ranks live, a log server without its records: each starts a generation, and the same may follow again. So
these are counted until there is progress, however often the job has reached RUNNING meanwhile. External deaths are not
counted: a launcher has its own limit (--max-restarts). But a process that repeatedly ends by itself before a new
version is a fault of its trainer.
"""

import signal

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator.job_record import JobRow, State
from swift_ft_services.coordinator.liveness import StepClock
from swift_ft_services.coordinator.timeouts import Timing

# A job that its trainer ends before the last step (`swift_ft.Session.stop`).
#
# ::
#
#     (a rank)     called it in a step, and completed that step: Finish, with the number of steps planned
#     (here)       JobRow.end: durable, then in the View
#     (every rank) runs no step from that version on; Finish
#     (here)       a rank that had begun the next step waits in it for a rank that has ended: starts a generation
#                  without a death, in which that step is dropped
#
# No rank is past that version: a rank that takes no part in a step blocks the pipeline, or the vote of the replicas. A
# replica that is lost after its update does not run the rest of the step's code, and its copy does not either. So
# replicas of a stage must decide alike, and that is checked.

UNLIKE_CODE = 2
"""Exit code of launchers if replicas disagree on the end: an error in the trainer."""


class Endings:
    """Handles the end that a trainer asks for. Changes the row; the caller makes that durable."""

    def __init__(self, row: JobRow, steps: StepClock, timing: Timing) -> None:
        self._row = row
        self._steps = steps
        self._timing = timing
        self._stands: tuple[int, float] | None = None
        """(generation, time since which all ranks are at the end and some have not reported Finish)"""

    def on_finish(self, finish: pb.FinishRequest) -> bool:
        end = self._row.end
        if not finish.called or (end is not None and _order(end) >= _order(finish)):
            return False
        self._row.end = finish
        return True

    def unlike(self, finish: pb.FinishRequest) -> str:
        """Returns why the job fails if a replica of this rank has decided differently; empty if none has."""
        row, rank = self._row, finish.rank
        others = [
            other
            for other, called in row.called.items()
            if called is (not finish.called)
            and (row.stages.get(other), row.stage_shards.get(other))
            == (row.stages.get(rank), row.stage_shards.get(rank))
        ]
        if not finish.HasField("called") or not others:
            return ""
        one, other = (rank, others[0]) if finish.called else (others[0], rank)
        return (
            f"rank {one} has called session.stop() in step {finish.version - 1}, its replica, rank {other}, has not; "
            "let all replicas decide alike, for instance by dist.all_reduce of what they decide by"
        )

    def due(self, now: float) -> str:
        """Returns why a generation must be started for all ranks to reach the end; empty if none is needed."""
        row, end = self._row, self._row.end
        if end is None:  # the usual case
            self._stands = None
            return ""
        late = [rank for rank in row.slots() if rank not in row.finished]
        stands = (
            row.state is State.RUNNING
            and end.version in row.finished.values()
            and all(self._steps.version(rank) >= end.version for rank in late)
        )
        if not stands:
            self._stands = None
            return ""
        if self._stands is None or self._stands[0] != row.generation:  # one may start between ticks
            self._stands = row.generation, now
        if now - self._stands[1] < self._timing.suspicion_s:
            return ""
        return (
            f"rank {end.rank} has ended the job with step {end.version - 1}; others have begun the next one"
        )


def reason(row: JobRow, version: int) -> str:
    """(FINISHED at this version) Returns why the job ended before the last step; empty if it did not."""
    end = row.end
    if end is None or end.version != version or end.num_steps <= version:
        return ""
    return f"stopped at step {version - 1}" + (f": {end.reason}" if end.reason else "")


def _order(finish: pb.FinishRequest) -> tuple[int, int]:
    """Returns the order of ends: more planned steps mean a later run; within one run the earliest end counts."""
    return finish.num_steps, -finish.version


REFUSALS_MAX = 8
"""Limit of generations without a death and without a new version. The next one ends the job."""
EXITS_MAX = 3
"""Number of processes of one rank that end by themselves without a new version, until the job ends."""
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
    | {signal.SIGINT}  # Python ends with it on an uncaught KeyboardInterrupt
)


class Setbacks:
    """Counts generations without progress. Changes the row; the caller makes that durable."""

    def __init__(self, row: JobRow, steps: StepClock) -> None:
        self._row = row
        self._steps = steps

    def begin_generation(self) -> None:
        row = self._row
        known = [self._steps.version(rank) for rank in row.holders]
        row.reached = max([row.reached, *known, *row.ready.values(), *row.checkpoints])
        row.setbacks += 1

    def made_progress(self) -> bool:
        """(a rank reported its version, or a checkpoint is complete) Returns True once all ranks have reached a new
        version. A complete checkpoint counts for every rank: with short steps a rank may die before its first report.
        """
        row = self._row
        if row.state is not State.RUNNING or not (row.setbacks or row.refusals or row.exits):
            return False
        saved = max(row.checkpoints, default=0)
        if any(max(self._steps.version(rank), saved) <= row.reached for rank in row.slots()):
            return False
        row.setbacks, row.refusals, row.exits = 0, 0, {}
        return True

    def refuse(self, what: str) -> str:
        """Counts a generation without a death. Returns why the job ends instead; empty if the generation may start."""
        row = self._row
        row.refusals += 1
        if row.refusals <= REFUSALS_MAX:
            return ""
        ends = f"{what} (no. {row.refusals} in a row without a version above {row.reached})"
        if row.inexact_since is None:
            return ends
        # If bits differ repeatedly, this is the cause, and tells the author what to fix.
        return f"{ends}; not exact since version {row.inexact_since}: {row.inexact_reason}"

    def exit(self, rank: int, code: int) -> str:
        """Counts an exit of the rank's process. Returns why the job ends with it; empty if it does not."""
        if code <= 0 and -code not in _OWN_SIGNALS:
            return ""
        codes = self._row.exits[rank] = [*self._row.exits.get(rank, ()), code]
        if len(codes) < EXITS_MAX:
            return ""
        at = max(self._row.reached, self._steps.version(rank))
        return f"rank {rank} {exit_words(code)}, {len(codes)} times without a version above {at}"


def exit_words(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def launcher_code(code: int) -> int:
    """Returns a launcher's exit code for that of a process; as in a shell, 128 + signal if it was killed."""
    return code if code >= 0 else 128 - code
