"""Early checkpoints, in a rank: the View names a version, every rank saves it when it gets there.

(log server) is running full, or (a rank) could not log some steps → (coordinator) ``checkpoint_at`` in the View →
(every rank, after each step) ``due`` → a rank that is past it already says so, and the View names a later one.
"""

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
