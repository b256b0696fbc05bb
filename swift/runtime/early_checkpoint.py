"""Early checkpoints, in a rank: the View names a version, every rank saves it when it gets there.

(log server) is running full, or (a rank) could not log some steps → (coordinator) ``checkpoint_at`` in the View →
(every rank, after each step) ``due`` → a rank that is past it already says so, and the View names a later one.
"""

from swift import events
from swift.errors import LogInterrupted, ServiceError
from swift.log.unlogged import Dropped
from swift.log.writers import Writer
from swift.runtime.member import Member


class EarlyCheckpoint:
    """Asked by the trainer's thread after each step; waits for nothing."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._settled: int | None = None  # the agreed version that was saved, or told to be too early

    def due(self, version: int) -> bool:
        """Is this the version that all ranks save?"""
        view = self._member.watcher.latest
        if view is None or not view.HasField("checkpoint_at"):
            return False
        agreed = view.checkpoint_at
        if version < agreed:
            self._settled = None  # perhaps again: after a restore
        elif version == agreed:
            self._settled = agreed
        elif self._settled != agreed:
            self._settled = agreed
            self._member.ask_checkpoint(version, f"was past version {agreed} when it heard of it")
        return version == agreed


def flush_at_end(writer: Writer, rank: int, timeout_s: float) -> None:
    """(all steps are done) So that others can be recovered without this rank; one that may drop records does not fail
    over it. Should there be a recovery all the same, it flushes again before it reports."""
    try:
        writer.flush(timeout_s)
    except ServiceError as error:
        if not writer.drops or isinstance(error, LogInterrupted):
            raise
        events.emit("not_flushed", rank=rank, reason=str(error))


class UnloggedSteps:
    """Tells, after each step, what of it was not logged, and asks for the checkpoint that makes up for it.

    Once when it begins (from there on a failure costs the steps since the newest checkpoint), and once more when a step
    is logged whole again: with a checkpoint behind the last unlogged one, whatever comes can be replayed. Not in
    between: as long as the log takes nothing, the next checkpoint is no better than the interval's.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._owed: Dropped | None = None  # the last ones, until a checkpoint behind them was asked for

    def after_step(self, step: int, dropped: Dropped | None) -> None:
        """(trainer's thread) `step` is done; `dropped`: what was not logged since the last call."""
        owed, self._owed = self._owed, dropped
        if dropped is not None:
            first, last = dropped.steps
            events.emit(
                "unlogged",
                rank=self._member.identity.rank,
                step=step,
                first_step=first,
                last_step=last,
                streams=list(dropped.streams),
                records=dropped.records,
                bytes=dropped.bytes,
            )
        if owed is not None and step < owed.steps.last:
            owed = None  # everybody has restored a checkpoint: that history is given up, and so is its log
        due = dropped if owed is None else owed if dropped is None else None
        if due is not None and not self._covered(due.steps.last):
            self._member.ask_checkpoint(due.steps.last, f"{due}, as the log could not keep up")

    def _covered(self, step: int) -> bool:
        """A checkpoint that has this step in it is complete, or agreed on."""
        view = self._member.watcher.latest
        if view is None:
            return False
        agreed = view.checkpoint_at if view.HasField("checkpoint_at") else -1
        return max([agreed, *view.checkpoints]) > step
