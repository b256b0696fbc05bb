"""Checkpoints of a job: which are complete, and early ones at a version that all ranks agree on.

::

    (log server, by the driver)  its log of the job needs a trim: LogsPressed
    (a rank)                     steps were not logged, or it was past the agreed version: AskCheckpoint
    (here)                       checkpoint_at: a version that nobody has passed yet; durable, then in the View
    (every rank)                 saves it when it gets there; CheckpointDurable, as for any other one
    (here)                       complete: checkpoint_at is gone, the log is trimmed

    (a rank)                     cannot write one, and has given up what it could not write before it: `hear`
    (here)                       shards_from: no incomplete checkpoint below it will ever be counted; in the View
    (every rank)                 removes its shards of those

Nobody waits for anybody, so the version is a guess: what heartbeats tell, and a margin for what they do not tell yet.
A rank that hears of it too late asks again, and the next margin is twice as wide.
"""

from collections.abc import Iterable

from services.coordinator import commands as m
from services.coordinator import log_end
from services.coordinator.row import JobRow
from services.coordinator.step_watchdog import StepClock
from services.coordinator.timing import Timing

KEPT_CHECKPOINTS = 2
KEPT_SHARDS = 8
_WIDEST = 64
GIVEN_UP = "checkpoints_given_up"


class CheckpointTracker:
    """Changes the row; its caller makes that durable."""

    def __init__(self, row: JobRow, steps: StepClock, timing: Timing) -> None:
        self._row = row
        self._steps = steps
        self._timing = timing
        self._widened = 1
        self.unsaved: dict[int, m.Unsaved] = {}
        """rank -> the checkpoint that it could not write yet; not durable: it is said again."""

    def count(self, durable: m.CheckpointDurable) -> bool | None:
        """A rank's shard. True: the checkpoint is complete. None: nothing has changed."""
        row = self._row
        newest = max(row.checkpoints, default=-1)
        given_up = durable.generation and durable.generation < row.rolled_back_in
        if durable.version <= newest or durable.version < row.shards_from or given_up:
            return None
        shards = row.shards.get(durable.version, frozenset())
        if durable.sender.rank in shards:
            return None
        shards = row.shards[durable.version] = shards | {durable.sender.rank}
        if row.lacks(shards):
            for version in sorted(row.shards)[:-KEPT_SHARDS]:
                del row.shards[version]
            return False
        row.checkpoints = [*row.checkpoints, durable.version][-KEPT_CHECKPOINTS:]
        row.shards = {v: ranks for v, ranks in row.shards.items() if v > durable.version}
        if row.checkpoint_at is not None and durable.version >= row.checkpoint_at:
            self.call_off()
        row.log_ends = row.log_ends or log_end.is_saved(row, durable.version)
        return True

    def hear(self, rank: int, unsaved: m.Unsaved | None) -> list[tuple[str, dict[str, object]]]:
        """What a heartbeat says: events, and their fields. The row has changed if one of them says so."""
        row, known = self._row, self.unsaved.pop(rank, None)
        if unsaved is None or unsaved.generation < row.rolled_back_in:
            return []
        self.unsaved[rank] = unsaved
        said: dict[str, object] = {"rank": rank, "version": unsaved.version, "reason": unsaved.reason}
        events = [("checkpoint_unsaved", said)] if unsaved != known else []
        lacking = [v for v, ranks in row.shards.items() if v < unsaved.version and rank not in ranks]
        if lacking:
            row.shards_from = max(lacking) + 1
            row.shards = {v: ranks for v, ranks in row.shards.items() if v >= row.shards_from}
            events.append((GIVEN_UP, {"rank": rank, "below_version": row.shards_from}))
        return events

    def forget(self, rank: int) -> None:
        """Its process is gone, and with it what it had not written."""
        self.unsaved.pop(rank, None)

    def roll_back(self, version: int) -> None:
        """Everybody restores that checkpoint: later ones come again."""
        row = self._row
        row.shards = {v: ranks for v, ranks in row.shards.items() if v <= version}
        row.shards_from = min(row.shards_from, version)
        self.call_off()

    def ask(self, after_version: int, reason: str) -> bool:
        """An early checkpoint of a version above. False: one is agreed on, or complete, already."""
        row = self._row
        agreed = row.checkpoint_at
        if max(row.checkpoints, default=-1) > after_version or (
            agreed is not None and agreed > after_version
        ):
            return False
        if agreed is not None:  # somebody was past it
            self._widened = min(2 * self._widened, _WIDEST)
        margin = 1 + self._steps.steps_within(self._horizon_s)
        row.checkpoint_at = max([after_version, *self._versions()]) + self._widened * margin
        row.checkpoint_reason = reason
        return True

    def newest_known(self) -> int:
        """The highest version that a rank is known to have got to."""
        return max(self._versions(), default=0)

    def run_on(self, version: int) -> None:
        """Training goes on at this version: nobody gets to an older one any more."""
        row = self._row
        if row.checkpoint_at is not None and row.checkpoint_at <= version:
            row.checkpoint_at = version + 1 + self._steps.steps_within(self._horizon_s)

    def call_off(self) -> None:
        """It is there, or the log is empty: nobody needs it."""
        self._row.checkpoint_at, self._row.checkpoint_reason = None, ""
        self._widened = 1

    @property
    def _horizon_s(self) -> float:
        """How old a version may be that heartbeats tell, and how long a View may take."""
        return 2 * self._timing.interval_s(self._row.wanted)

    def _versions(self) -> Iterable[int]:
        return [self._steps.version(rank) for rank in self._row.holders]
