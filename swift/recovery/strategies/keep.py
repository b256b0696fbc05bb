"""KEEP: the rank holds the target already."""

from collections.abc import Mapping

from swift.recovery.strategies.catch_up import CatchUp
from swift.recovery.strategies.policy import Policy, Way
from swift.recovery.types import Report, Strategy


class Keep(Policy):
    """Holds the version whole. Whoever holds an older one than the target catches up."""

    strategy = Strategy.KEEP
    rests = True
    verb = "holds"

    def reach(self, report: Report) -> Way | None:
        return None if report.version is None else Way(by=self, version=report.version)

    @property
    def behind(self) -> Policy:
        return CatchUp()

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        return f"holds version {target}"
