"""CHECKPOINT: everybody goes back to one."""

from swift.recovery.strategies.policy import Begins, Policy
from swift.recovery.types import Strategy


class Checkpoint(Policy):
    """Loads the checkpoint of the target; nothing is replayed. The planner says why
    (`swift.recovery.plan`)."""

    strategy = Strategy.CHECKPOINT
    begins = Begins.CHECKPOINT
    goes_back = True
    excluded_by = frozenset()
