"""A job that its trainer ends before the last step (`swift.Session.stop`).

::

    (a rank)     has called it in a step, and has done that step: Finish, with how many steps were to be done
    (here)       JobRow.end: durable, then in the View
    (every rank) does no step from that version on; Finish
    (here)       whoever had begun the next step waits in it for one that does not come: a generation without a death,
                 in which that step is dropped

Nobody is past that version: a rank that does not take part in a step holds up the pipeline, or the vote of the
replicas. A replica that is lost behind its update does not come to what the step's code says after it, and its copy
does not either: so replicas of a stage have to decide alike, and that is checked.
"""

from services.coordinator import commands as m
from services.coordinator.row import End, JobRow, State
from services.coordinator.step_watchdog import StepClock
from services.coordinator.timing import Timing

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

    def hear(self, finish: m.Finish) -> bool:
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
