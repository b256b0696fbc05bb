"""Which steps that are under way may be finished."""

from collections.abc import Sequence
from dataclasses import replace

from swift.recovery.types import Report


def finishable(reports: Sequence[Report]) -> list[Report]:
    """Without the steps that are done again rather than finished.

    A rank in its vote has all gradients of the step, and could finish it. But one that died may not have come as far,
    and have left undone what it does before it votes: its line of the step (`session.log`). Whoever copies the finished
    step never does it. So where lines are written a step is finished if somebody is through the vote, hence everybody
    had voted, and by a rank that cannot take it back. Who can take back the step behind it is through its vote as well.
    """
    held = max(
        (v for report in reports for v in (report.version, report.undo_to) if v is not None), default=-1
    )
    return [replace(report, forward_to=None) if _waits(report, held) else report for report in reports]


def _waits(report: Report, held: int) -> bool:
    takes_back = report.version is not None or (report.undo_to is not None and report.undo_exact)
    return report.forward_by_all and takes_back and report.forward_to is not None and report.forward_to > held
