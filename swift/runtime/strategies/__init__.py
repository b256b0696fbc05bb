"""How a rank carries each strategy out.

The planner's side, and the recipe for another strategy, are in `swift.recovery.strategies`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from swift.recovery import Strategy
from swift.runtime.strategies.load import Load
from swift.runtime.strategies.replica import Replica
from swift.runtime.strategies.restore import Restore
from swift.runtime.strategies.snapshot import Snapshot
from swift.runtime.strategies.undo import Undo

TABLE: Mapping[Strategy, Restore] = MappingProxyType(
    {
        Strategy.KEEP: Restore(),
        Strategy.ROLL_FORWARD: Restore(),  # the vote finishes the step, on the trainer's own stack (`Engine.vote`)
        Strategy.LOSSY_FORWARD: Restore(),  # so does the reduction (`swift.runtime.cut_step`)
        Strategy.UNDO: Undo(),
        Strategy.REPLICA: Replica(),
        Strategy.CATCH_UP: Restore(),
        Strategy.REPLAY: Load(),
        Strategy.SNAPSHOT: Snapshot(),
        Strategy.CHECKPOINT: Load(),
    }
)
assert set(TABLE) == set(Strategy), "every strategy can be carried out"
