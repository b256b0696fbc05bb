"""How a job ends: by its trainer, without progress, or with a log that begins anew from a checkpoint.

Generations without progress: every way to loop ends within a bound, with its reason.

Progress is a version that no rank had before, on all ranks of a job that runs. A rank that refuses, a connection that
breaks while everybody lives, a log server that forgets: each makes a generation, and the same may come again after it.
So these are counted until there is progress, however often the job has run meanwhile. Deaths from outside are not: a
launcher has a limit of its own (--max-restarts). But a process that ends by itself, again and again before a new
version, is its trainer's doing.
"""

import signal

from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.job_record import End, JobRow, State
from swift_ft_services.coordinator.liveness import StepClock
from swift_ft_services.coordinator.text import exit_words
from swift_ft_services.coordinator.timeouts import Timing

# A job that its trainer ends before the last step (`swift_ft.Session.stop`).
#
# ::
#
#     (a rank)     has called it in a step, and has done that step: Finish, with how many steps were to be done
#     (here)       JobRow.end: durable, then in the View
#     (every rank) does no step from that version on; Finish
#     (here)       whoever had begun the next step waits in it for one that does not come: a generation without a death,
#                  in which that step is dropped
#
# Nobody is past that version: a rank that does not take part in a step holds up the pipeline, or the vote of the
# replicas. A replica that is lost behind its update does not come to what the step's code says after it, and its copy
# does not either: so replicas of a stage have to decide alike, and that is checked.

UNLIKE_CODE = 2
"""What launchers end with where replicas have decided otherwise: a mistake of the trainer's."""


class Endings:
    """Changes the row; its caller makes that durable."""

    def __init__(self, row: JobRow, steps: StepClock, timing: Timing) -> None:
        self._row = row
        self._steps = steps
        self._timing = timing
        self._stands: tuple[int, float] | None = None
        """The generation in which everybody has come to the end, and somebody does not say so; and since when."""

    def on_finish(self, finish: m.Finish) -> bool:
        """True: the end is known now, and was not."""
        end = self._row.end
        if not finish.called or (end is not None and (end.num_steps, -end.version) >= _order(finish)):
            return False
        self._row.end = End(
            version=finish.version, num_steps=finish.num_steps, rank=finish.sender.rank, reason=finish.reason
        )
        return True

    def unlike(self, finish: m.Finish) -> str:
        """Why the job fails: a replica of this rank has decided otherwise. Empty: none has."""
        row, rank = self._row, finish.sender.rank
        others = [
            other
            for other, called in row.called.items()
            if called is (not finish.called)
            and (row.stages.get(other), row.stage_shards.get(other))
            == (row.stages.get(rank), row.stage_shards.get(rank))
        ]
        if finish.called is None or not others:
            return ""
        one, other = (rank, others[0]) if finish.called else (others[0], rank)
        return (
            f"rank {one} has called session.stop() in step {finish.version - 1}, its replica, rank {other}, has not; "
            "let all replicas decide alike, for instance by dist.all_reduce of what they decide by"
        )

    def due(self, now: float) -> str:
        """Why a generation is made, so that all come to the end. Empty: none is."""
        row, end = self._row, self._row.end
        if end is None:  # of most jobs, always
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
        if self._stands is None or self._stands[0] != row.generation:  # there may be one between two ticks
            self._stands = row.generation, now
        if now - self._stands[1] < self._timing.suspicion_s:
            return ""
        return (
            f"rank {end.rank} has ended the job with step {end.version - 1}; others have begun the next one"
        )


def reason(row: JobRow, version: int) -> str:
    """(FINISHED at this version) Why it is before the last step; empty: it is not."""
    end = row.end
    if end is None or end.version != version or end.num_steps <= version:
        return ""
    return f"stopped at step {version - 1}" + (f": {end.reason}" if end.reason else "")


def _order(finish: m.Finish) -> tuple[int, int]:
    """More steps than before are another run; of one, the earliest end counts."""
    return finish.num_steps, -finish.version


# A job whose state is not what its log leads to: a checkpoint of it at once, and the log begins anew behind that.
#
# ::
#
#     (planner)     a rank reports that it is off the log (swift_ft.planner.plan): `Plan.saves`
#     (every rank)  at the target: saves it, CheckpointDurable, Ready; who came off the log says so
#     (here)        the checkpoint is complete: `JobRow.log_ends`. Whatever happens from now on, the log goes
#     (here)        all are Ready: another generation instead of RUNNING
#     (planner)     everybody keeps what it holds, or loads that checkpoint; the log is given up
#     (core)        the logs are emptied, RECOVERING, all are Ready again, RUNNING
#
# Until the checkpoint is complete, the one before it and the log stand behind the job as they were: nothing of what
# came off the log is in there. So whoever is lost meanwhile is replayed from them, and at worst all restore.


def is_ready(row: JobRow, ready: m.Ready) -> None:
    row.ready[ready.sender.rank] = ready.version
    if ready.off_log:
        row.off_log = sorted({*row.off_log, ready.sender.rank})


def is_saved(row: JobRow, version: int) -> bool:
    """This checkpoint is the one that the log ends with. Perhaps nobody came off the log, which who died may not have
    said: giving it up is right all the same."""
    return _saves(row) and row.plan is not None and version == row.plan.target_version


def ends_next(row: JobRow) -> str:
    """(all are ready) Why the job does not run yet; empty: it does."""
    if not _saves(row):
        return ""
    if not row.off_log:
        row.log_ends = False  # the replays were exact after all
        return ""
    names = ", ".join(map(str, row.off_log))
    target = max(row.ready.values())
    if row.log_ends:
        return f"the checkpoint of version {target} is complete: the log, which rank {names} has left, begins anew"
    # All have said that they have saved it. If that is not so, the log is what is left: replay from it, exactly.
    why = f"no checkpoint of version {target} came about, and rank {names} has left the log"
    row.refused = row.refused.and_help(why)
    return why


def leave_recovering(row: JobRow) -> None:
    """(a new generation) What was saved of a version that never became complete may be of another history."""
    if _saves(row) and not row.log_ends:
        row.rolled_back_in = row.generation + 1
        row.shards = {}
    row.off_log = []


def _saves(row: JobRow) -> bool:
    return row.state is State.RECOVERING and row.plan is not None and row.plan.saves


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
