"""REPLAY: from the checkpoint, by replay."""

from collections.abc import Mapping

from swift.recovery.strategies.policy import Begins, Policy, Way, held
from swift.recovery.types import FROM_CHECKPOINT, SHRINKING, Report, Strategy


class Replay(Policy):
    """Holds nothing of use: loads the newest checkpoint that is not newer than the target, and replays from there.

    Planned for whole recovery groups that reach no version otherwise, so it has no `reach` of its own.
    """

    strategy = Strategy.REPLAY
    begins = Begins.CHECKPOINT
    replays = True
    excluded_by = SHRINKING | FROM_CHECKPOINT | {"replica", "snapshot"}

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        way = ways[report.rank]
        return f"{held(report)}{way.note}; the newest complete checkpoint is of version {way.version}"
