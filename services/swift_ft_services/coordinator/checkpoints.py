"""Checkpoints of a job, rehearsals of recoveries, and whether the job is exact.

Checkpoints of a job: which are complete, and early ones at a version that all ranks agree on.

::

    (log server, by the driver)  its log of the job needs a trim: LogsPressed
    (a rank)                     steps were not logged, or it was past the agreed version: AskCheckpoint
    (here)                       checkpoint_at: a version that nobody has passed yet; durable, then in the View
    (every rank)                 saves it when it gets there; CheckpointDurable, as for any other one
    (here)                       complete: checkpoint_at is gone, the log is trimmed

    (a rank)                     cannot write one, and has given up what it could not write before it: `on_heartbeat`
    (here)                       shards_from: no incomplete checkpoint below it will ever be counted; in the View
    (every rank)                 removes its shards of those

Nobody waits for anybody, so the version is a guess: what heartbeats tell, and a margin for what they do not tell yet.
A rank that hears of it too late asks again, and the next margin is twice as wide.
"""

from collections.abc import Iterable
from dataclasses import replace

from swift_ft.planner import Plan
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator import endings
from swift_ft_services.coordinator.checks import check_holder
from swift_ft_services.coordinator.job_record import JobRow, Rehearsal
from swift_ft_services.coordinator.liveness import StepClock
from swift_ft_services.coordinator.timeouts import Timing

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
        row.log_ends = row.log_ends or endings.is_saved(row, durable.version)
        return True

    def on_heartbeat(self, rank: int, unsaved: m.Unsaved | None) -> list[tuple[str, dict[str, object]]]:
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


# Whether the job's bits are still those of a run that never failed; for good, and with the reason.
#
# A restore of the checkpoint is exact if a step is a function of what the checkpoint holds. A replay, a copy or a
# comparison in which something *differed* is evidence that it is not (randomness of its own, a loader that is not
# registered): what the trainer keeps elsewhere does not go back with the checkpoint. Damage is no such evidence.

# Rehearsals of recoveries: which steps of which rank can be done again, and what came of it.
#
# ::
#
#     (rank)      CheckpointDurable(recorded): it records its steps from that version on, in its log
#     (here)      `recorded`; in the View
#     (launcher)  starts a process that is no rank, which does these steps again (`swift_ft.launch.spares`)
#     (launcher)  Rehearsed(under_way) ... Rehearsed with what came of it
#     (here)      `begin`, `end`: a difference makes the job not exact
#
# While a rehearsal is under way the log is not trimmed past its checkpoint, until the second checkpoint after it is
# complete. A new generation ends all that are under way.


def recorded(row: JobRow, durable: m.CheckpointDurable) -> bool:
    """Notes from which version on a rank records its steps. Whether that is news."""
    known = row.rehearsals.get(durable.sender.rank, Rehearsal())
    if not durable.recorded or known.recorded == durable.version or row.state.is_over:
        return False
    row.rehearsals[durable.sender.rank] = replace(known, recorded=durable.version)
    return True


def begin_rehearsal(row: JobRow, said: m.Rehearsed) -> None:
    known = row.rehearsals.get(said.rank, Rehearsal())
    row.rehearsals[said.rank] = replace(known, under_way=said.version)


def end_rehearsal(row: JobRow, said: m.Rehearsed) -> bool:
    """Whether the job is not exact for it, and was not known to be so."""
    known = replace(row.rehearsals.get(said.rank, Rehearsal()), under_way=None, why_not=said.why_not)
    if known.recorded == said.version:
        known = replace(known, recorded=None)  # what was rehearsed, or cannot be, is not tried again
    if not said.why_not:
        known = replace(
            known, done=known.done + 1, version=said.version, steps=said.steps, difference=said.difference
        )
    row.rehearsals[said.rank] = known
    if not said.difference or (row.inexact_since is not None and row.inexact_since <= said.version):
        return False
    row.inexact_since = said.version
    row.inexact_reason = f"rank {said.rank}, rehearsed from version {said.version}: {said.difference}"
    return True


def forget(row: JobRow) -> None:
    """Ends those under way, and forgets what was recorded: a new generation may do these steps otherwise."""
    for rank, known in list(row.rehearsals.items()):
        if known.recorded is not None or known.under_way is not None:
            row.rehearsals[rank] = replace(known, recorded=None, under_way=None)


def give_way(row: JobRow) -> bool:
    """Ends those under way, for which a log that is full cannot wait. Whether there are any."""
    under_way = {rank: known for rank, known in row.rehearsals.items() if known.under_way is not None}
    for rank, known in under_way.items():
        row.rehearsals[rank] = replace(known, under_way=None)
    return bool(under_way)


def trim_below(row: JobRow) -> int:
    """The step below which nothing in the log is needed: of the newest complete checkpoint, or of the one before it
    while a rehearsal reads on from there."""
    under_way = [known.under_way for known in row.rehearsals.values() if known.under_way is not None]
    return max(row.checkpoints[0], min([row.checkpoints[-1], *under_way]))


def note_refused_difference(row: JobRow, rank: int, reason: str) -> None:
    """(a refusal) Something that `rank` did again came out different."""
    row.differed = row.differed or f"rank {rank}: {reason}"


def note_difference(row: JobRow, said: m.Differs) -> bool:
    """A step done again came out different, without a refusal. Whether that is news. The earliest such step counts."""
    check_holder(row, said.sender)
    if row.inexact_since is not None and row.inexact_since <= said.version:
        return False
    row.inexact_since, row.inexact_reason = said.version, f"rank {said.sender.rank}: {said.reason}"
    return True


def with_reason(row: JobRow, plan: Plan) -> Plan:
    """The plan, if it restores the checkpoint for such a reason: not exact."""
    if not (row.differed and plan.restores):
        return plan
    known = row.differed.partition(": ")[2] in plan.reason
    why = "" if known else f", since something differed: {row.differed}"
    return replace(plan, exact=False, reason=f"{plan.reason}; not exact{why}")


def record_plan_exactness(row: JobRow) -> bool:
    """(RUNNING) What the plan was lasts. Whether that is news."""
    plan, differed, row.differed = row.plan, row.differed, ""
    if plan is None or plan.exact or row.inexact_since is not None:
        return False
    if plan.saves and not row.off_log:
        return False  # the replays were exact after all
    row.inexact_since, row.inexact_reason = plan.target_version, differed or plan.reason
    return True


def requires_exact(row: JobRow) -> bool:
    """A job that is not exact is to fail."""
    return row.config.get("require_exact", "") == "True"


def exactness_fields(row: JobRow) -> dict[str, object]:
    """In the trace."""
    return {"since": row.inexact_since, "reason": row.inexact_reason}
