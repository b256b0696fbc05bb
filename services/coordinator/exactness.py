"""Whether the job's bits are still those of a run that never failed; for good, and with the reason.

A restore of the checkpoint is exact if a step is a function of what the checkpoint holds. A replay, a copy or a
comparison in which something *differed* is evidence that it is not (randomness of its own, a loader that is not
registered): what the trainer keeps elsewhere does not go back with the checkpoint. Damage is no such evidence.
"""

from dataclasses import replace

from services.coordinator import commands as m
from services.coordinator.command_checks import check_holder
from services.coordinator.row import JobRow
from swift.recovery import Plan


def differs(row: JobRow, rank: int, reason: str) -> None:
    """(a refusal) Something that `rank` did again came out different."""
    row.differed = row.differed or f"rank {rank}: {reason}"


def differed(row: JobRow, said: m.Differs) -> bool:
    """A step done again came out different, without a refusal. Whether that is news. The earliest such step counts."""
    check_holder(row, said.sender)
    if row.inexact_since is not None and row.inexact_since <= said.version:
        return False
    row.inexact_since, row.inexact_reason = said.version, f"rank {said.sender.rank}: {said.reason}"
    return True


def named(row: JobRow, plan: Plan) -> Plan:
    """The plan, if it restores the checkpoint for such a reason: not exact."""
    if not (row.differed and plan.restores):
        return plan
    known = row.differed.partition(": ")[2] in plan.reason
    why = "" if known else f", since something differed: {row.differed}"
    return replace(plan, exact=False, reason=f"{plan.reason}; not exact{why}")


def settle(row: JobRow) -> bool:
    """(RUNNING) What the plan was lasts. Whether that is news."""
    plan, differed, row.differed = row.plan, row.differed, ""
    if plan is None or plan.exact or row.inexact_since is not None:
        return False
    if plan.saves and not row.off_log:
        return False  # the replays were exact after all
    row.inexact_since, row.inexact_reason = plan.target_version, differed or plan.reason
    return True


def fields(row: JobRow) -> dict[str, object]:
    """In the trace."""
    return {"since": row.inexact_since, "reason": row.inexact_reason}
