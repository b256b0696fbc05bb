"""SNAPSHOT: everybody goes back to copies in host memory."""

from swift.recovery.strategies.policy import Begins, Policy
from swift.recovery.types import SNAPSHOTTING, STRATEGIES, Strategy


class Snapshot(Policy):
    """Takes the rank's own copy, or receives the one that another rank keeps of it; nothing is replayed."""

    strategy = Strategy.SNAPSHOT
    begins = Begins.SNAPSHOT
    goes_back = True
    excluded_by = frozenset(STRATEGIES) - SNAPSHOTTING
