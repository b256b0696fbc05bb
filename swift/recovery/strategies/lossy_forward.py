"""LOSSY_FORWARD: the step under way is finished with the gradients of those that are left."""

from collections.abc import Mapping

from swift.recovery.strategies.policy import Policy, Way, held
from swift.recovery.types import STRATEGIES, Report, Strategy


class LossyForward(Policy):
    """Keeps what is averaged of the step that is under way, and averages the rest with those that are left.

    It takes the gradients of all of them. So it is a way only where each of them is in the step. Where one is not,
    nothing of the step was averaged, or whoever has all of it can finish it alone.
    """

    strategy = Strategy.LOSSY_FORWARD
    finishes_step = True
    own_step = True
    together = True
    excluded_by = frozenset(STRATEGIES) - {"lossy-forward"}
    verb = "finishes the step to"

    def reach(self, report: Report) -> Way | None:
        return None if report.finish_to is None else Way(by=self, version=report.finish_to)

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        return f"{held(report)}, and finishes step {target - 1} with the gradients of those that are left"
