"""CHECKPOINT: everybody goes back to one."""

from swift.recovery.strategies.policy import Begins, Policy
from swift.recovery.types import Strategy


class Checkpoint(Policy):
    """Loads the checkpoint of the target; nothing is replayed. Planned for all ranks or for none: the run goes back,
    and what the log has beyond is given up. The planner says why (`swift.recovery.plan`)."""

    strategy = Strategy.CHECKPOINT
    begins = Begins.CHECKPOINT
    excluded_by = frozenset()
