"""UNDO: the step under way is taken back."""

from collections.abc import Mapping

from swift.recovery.strategies.policy import Policy, Way, held
from swift.recovery.types import Report, Strategy


class Undo(Policy):
    """Takes the buckets back that are applied. Moves no bytes; exact if what the inverse loses was kept."""

    strategy = Strategy.UNDO
    own_step = True
    verb = "goes back to"
    noun = "the undo"

    def reach(self, report: Report) -> Way | None:
        if report.undo_to is None:
            return None
        return Way(by=self, version=report.undo_to, exact=report.undo_exact)

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        way = ways[report.rank]
        exactly = "bit for bit" if way.exact else "not bit for bit"
        return f"{held(report)}, and takes step {way.version} back, {exactly}"
