"""Checkpoints of a job, rehearsals of recoveries, and whether the job is exact.

Checkpoints: tracks which are complete, and schedules early ones at a version common to all ranks.

::

    (log server, by the driver)  its log of the job needs a trim: LogsPressed
    (a rank)                     steps were not logged, or it had passed the agreed version: AskCheckpoint
    (here)                       checkpoint_at: a version that no rank has passed yet; durable, then in the View
    (every rank)                 saves it at that version; CheckpointDurable, as for any other checkpoint
    (here)                       complete: checkpoint_at is cleared, the log is trimmed

    (a rank)                     cannot write one, and has given up older ones that it had not written: `on_heartbeat`
    (here)                       shards_from: incomplete checkpoints below it never become complete; in the View
    (every rank)                 removes its shards of those

Ranks do not wait for each other, so the version is a guess: the newest version in heartbeats, plus a margin for steps
not reported yet. A rank that learns of it too late asks again, and the next margin is twice as wide.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import optional
from swift_ft.planner import Plan
from swift_ft_services.coordinator.checks import check_holder
from swift_ft_services.coordinator.job_record import JobRow
from swift_ft_services.coordinator.liveness import StepClock
from swift_ft_services.coordinator.timeouts import Timing

KEPT_CHECKPOINTS = 2
KEPT_SHARDS = 8
_WIDEST = 64
GIVEN_UP = "checkpoints_given_up"


class CheckpointTracker:
    """Completes, schedules and discards checkpoints. Changes the row; the caller makes that durable."""

    def __init__(self, row: JobRow, steps: StepClock, timing: Timing) -> None:
        self._row = row
        self._steps = steps
        self._timing = timing
        self._widened = 1
        self.unsaved: dict[int, pb.UnsavedCheckpoint] = {}
        """rank -> the checkpoint that it could not write yet. Not durable: heartbeats repeat it."""

    def count(self, durable: pb.CheckpointRequest) -> bool | None:
        """Counts a rank's shard. Returns True if the checkpoint is complete now, None if the row is unchanged."""
        row = self._row
        newest = max(row.checkpoints, default=-1)
        given_up = durable.generation and durable.generation < row.rolled_back_in
        if durable.version <= newest or durable.version < row.shards_from or given_up:
            return None
        shards = row.shards.get(durable.version, frozenset())
        if durable.rank in shards:
            return None
        shards = row.shards[durable.version] = shards | {durable.rank}
        if row.lacks(shards):
            for version in sorted(row.shards)[:-KEPT_SHARDS]:
                del row.shards[version]
            return False
        row.checkpoints = [*row.checkpoints, durable.version][-KEPT_CHECKPOINTS:]
        row.shards = {v: ranks for v, ranks in row.shards.items() if v > durable.version}
        if row.checkpoint_at is not None and durable.version >= row.checkpoint_at:
            self.call_off()
        return True

    def on_heartbeat(
        self, rank: int, unsaved: pb.UnsavedCheckpoint | None
    ) -> list[tuple[str, dict[str, object]]]:
        """Applies a heartbeat's unsaved checkpoint. Returns (event, fields) pairs; GIVEN_UP means the row changed."""
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
        self.unsaved.pop(rank, None)

    def roll_back(self, version: int) -> None:
        """Discards shards of versions above `version`, which all ranks restore: they will be saved again."""
        row = self._row
        row.shards = {v: ranks for v, ranks in row.shards.items() if v <= version}
        row.shards_from = min(row.shards_from, version)
        self.call_off()

    def ask(self, after_version: int, reason: str) -> bool:
        """Schedules an early checkpoint above `after_version`. Returns False if one is scheduled or complete."""
        row = self._row
        agreed = row.checkpoint_at
        if max(row.checkpoints, default=-1) > after_version or (
            agreed is not None and agreed > after_version
        ):
            return False
        if agreed is not None:  # some rank had passed it
            self._widened = min(2 * self._widened, _WIDEST)
        margin = 1 + self._steps.steps_within(self._horizon_s)
        row.checkpoint_at = max([after_version, *self._versions()]) + self._widened * margin
        row.checkpoint_reason = reason
        return True

    def newest_known(self) -> int:
        return max(self._versions(), default=0)

    def run_on(self, version: int) -> None:
        """Moves an early checkpoint that is due above `version`, from which training continues."""
        row = self._row
        if row.checkpoint_at is not None and row.checkpoint_at <= version:
            row.checkpoint_at = version + 1 + self._steps.steps_within(self._horizon_s)

    def call_off(self) -> None:
        """Cancels the early checkpoint: it is complete, or the log is empty."""
        self._row.checkpoint_at, self._row.checkpoint_reason = None, ""
        self._widened = 1

    @property
    def _horizon_s(self) -> float:
        """Seconds by which a reported version may be outdated, plus the time a View may take to arrive."""
        return 2 * self._timing.interval_s(self._row.wanted)

    def _versions(self) -> Iterable[int]:
        return [self._steps.version(rank) for rank in self._row.holders]


# Exactness: whether the job's bits are those of a run without failures. Once lost, it stays lost, with the reason.
#
# Restoring a checkpoint is exact if a step is a function of the checkpoint's content. A replay, a copy or a comparison
# that *differed* is evidence that it is not (an unregistered generator or data loader): state that the trainer keeps
# elsewhere is not restored with the checkpoint. Damage is no such evidence.

# Rehearsals of recoveries: which steps of which rank can be repeated, and with which result.
#
# ::
#
#     (rank)      CheckpointDurable(recorded): it records its steps from that version on, in its log
#     (here)      `recorded`; in the View
#     (launcher)  starts a process that is no rank, which repeats these steps (`swift_ft.launch.spares`)
#     (launcher)  Rehearsed(under_way) ... Rehearsed with the result
#     (here)      `begin_rehearsal`, `end_rehearsal`: a difference makes the job not exact
#
# During a rehearsal the log is not trimmed past its checkpoint, until the second checkpoint after it is complete. A new
# generation ends all rehearsals.


def _rehearsal(row: JobRow, rank: int) -> pb.Rehearsal:
    """Returns a copy of what is known of the rank's rehearsals, to be changed and put in the row."""
    copy = pb.Rehearsal(rank=rank)
    if rank in row.rehearsals:
        copy.CopyFrom(row.rehearsals[rank])
    return copy


def recorded(row: JobRow, durable: pb.CheckpointRequest) -> bool:
    if not durable.recorded or row.state.is_over:
        return False
    known = _rehearsal(row, durable.rank)
    if optional(known, "recorded") == durable.version:
        return False
    known.recorded = durable.version
    row.rehearsals[durable.rank] = known
    return True


def begin_rehearsal(row: JobRow, said: pb.RehearsedRequest) -> None:
    known = _rehearsal(row, said.rank)
    known.under_way = said.version
    row.rehearsals[said.rank] = known


def end_rehearsal(row: JobRow, said: pb.RehearsedRequest) -> bool:
    """Records the result of a rehearsal. Returns True if it makes the job inexact from an earlier version."""
    known = _rehearsal(row, said.rank)
    known.ClearField("under_way")
    known.why_not = said.why_not
    if known.recorded == said.version:
        known.ClearField("recorded")  # a rehearsal that completed, or cannot, is not repeated
    if not said.why_not:
        known.done += 1
        known.version, known.steps, known.difference = said.version, said.steps, said.difference
    row.rehearsals[said.rank] = known
    if not said.difference or (row.inexact_since is not None and row.inexact_since <= said.version):
        return False
    row.inexact_since = said.version
    row.inexact_reason = f"rank {said.rank}, rehearsed from version {said.version}: {said.difference}"
    return True


def forget(row: JobRow) -> None:
    """Ends all rehearsals and clears recorded versions: a new generation may run these steps differently."""
    _clear(row, "recorded", "under_way")


def give_way(row: JobRow) -> bool:
    """Ends all rehearsals, because a full log needs a trim. Returns whether there were any."""
    return _clear(row, "under_way")


def _clear(row: JobRow, *names: Literal["recorded", "under_way"]) -> bool:
    ranks = [rank for rank, known in row.rehearsals.items() if any(known.HasField(name) for name in names)]
    for rank in ranks:
        known = _rehearsal(row, rank)
        for name in names:
            known.ClearField(name)
        row.rehearsals[rank] = known
    return bool(ranks)


def trim_below(row: JobRow) -> int:
    """Returns the step below which no record is needed: the newest complete checkpoint, or the one before it while a
    rehearsal reads from there."""
    under_way = [known.under_way for known in row.rehearsals.values() if known.HasField("under_way")]
    return max(row.checkpoints[0], min([row.checkpoints[-1], *under_way]))


def note_difference(row: JobRow, said: pb.DiffersRequest) -> bool:
    """Records a repeated step with a different result, without a refusal. The earliest such step counts. Returns
    whether the row changed. Raises Refusal unless the sender holds its rank."""
    check_holder(row, said)
    if row.inexact_since is not None and row.inexact_since <= said.version:
        return False
    row.inexact_since, row.inexact_reason = said.version, f"rank {said.rank}: {said.reason}"
    return True


def with_reason(row: JobRow, plan: Plan) -> Plan:
    """Returns the plan, marked not exact if it restores a checkpoint after a difference."""
    if not (row.differed and plan.restores):
        return plan
    known = row.differed.partition(": ")[2] in plan.reason
    why = "" if known else f", since something differed: {row.differed}"
    return replace(plan, exact=False, reason=f"{plan.reason}; not exact{why}")


def record_plan_exactness(row: JobRow) -> bool:
    """(RUNNING) Marks the job not exact if its plan was not. Returns whether the row changed."""
    plan, differed, row.differed = row.plan, row.differed, ""
    if plan is None or plan.exact or row.inexact_since is not None:
        return False
    row.inexact_since, row.inexact_reason = plan.target_version, differed or plan.reason
    return True
