"""What a simulated rank does under log_when_full="drop", beside the real `Unlogged`.

It asks for a checkpoint and saves the one that is agreed on: as `swift_ft.train.checkpointing`, which would bring
torch along.
"""

from contextlib import nullcontext

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log.record import Dropped, Unlogged


class Dropping:
    """Of one process."""

    def __init__(self, queue: int) -> None:
        """``queue``: records that may wait for an acknowledgement; 0: the writer is blocked instead."""
        self.queue = queue
        self.unlogged = Unlogged(nullcontext())
        self.wanted: tuple[int, str] | None = None
        """A checkpoint above this version, and why; until the coordinator has heard it."""
        self._owed: Dropped | None = None
        self._settled: int | None = None

    def refuses(self, stream: str, step: int, waiting: int) -> bool:
        """Whether a record is dropped, with so many waiting."""
        return waiting >= self.queue or self.unlogged.refuses(stream, step, waiting, self.queue)

    def after_step(self, step: int) -> None:
        """As `UnloggedSteps`."""
        dropped = self.unlogged.news()
        owed, self._owed = self._owed, dropped
        if owed is not None and step < owed.steps.last:
            owed = None
        due = dropped if owed is None else owed if dropped is None else None
        if due is not None:
            self.wanted = (due.steps.last, str(due))

    def saves(self, view: pb.View, version: int) -> bool:
        """As `EarlyCheckpoint`: whether this is the version that all ranks save."""
        if not view.HasField("checkpoint_at"):
            return False
        agreed = view.checkpoint_at
        if version < agreed:
            self._settled = None
        elif version == agreed:
            self._settled = agreed
        elif self._settled != agreed:
            self._settled = agreed
            self.wanted = (version, f"was past version {agreed} when it heard of it")
        return version == agreed

    def forget(self) -> None:
        """The log is empty."""
        self.unlogged.forget()
