"""CATCH_UP: from an older version, which the rank holds, by replay."""

from collections.abc import Mapping

from swift.recovery.strategies.policy import Policy, Way
from swift.recovery.types import FROM_CHECKPOINT, SHRINKING, Report, Strategy


class CatchUp(Policy):
    """Holds an older version than the target whole, and replays from there. (It is reached as KEEP is.)"""

    strategy = Strategy.CATCH_UP
    replays = True
    excluded_by = SHRINKING | FROM_CHECKPOINT | {"replica", "snapshot"}

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        version = ways[report.rank].version
        return f"holds version {version}, {target - version} behind"
