"""ROLL_FORWARD: the step under way is finished."""

from collections.abc import Mapping

from swift.recovery.strategies.policy import Policy, Way, held
from swift.recovery.types import FROM_CHECKPOINT, Report, Strategy


class RollForward(Policy):
    """Finishes the step that is under way: all its gradients are reduced. Moves no bytes."""

    strategy = Strategy.ROLL_FORWARD
    finishes_step = True
    own_step = True
    excluded_by = FROM_CHECKPOINT | {"rollback"}
    verb = "rolls forward to"

    def reach(self, report: Report) -> Way | None:
        return None if report.forward_to is None else Way(by=self, version=report.forward_to)

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        return f"{held(report)}, and has all gradients of step {ways[report.rank].version - 1} reduced"
