"""Pure decisions: reports in, plan out. No torch, no I/O, no clock.

`plan()` says how every rank gets to the agreed version, and why; `plan_off_log()` the same where a state is not, or
will not be, what the log leads to.
"""

from swift.recovery.assignment import Assignment, Slot
from swift.recovery.decision import Help, Plan, Prediction, RankPlan
from swift.recovery.finishing import finishable
from swift.recovery.groups import RecoveryGroups
from swift.recovery.measured import RankMeasured, Sent, StageMeasured
from swift.recovery.moving import worth_moving
from swift.recovery.off_log import plan_off_log
from swift.recovery.plan import plan
from swift.recovery.refusals import Refusals
from swift.recovery.types import (
    FROM_CHECKPOINT,
    LOST_SHARDS,
    SHRINKING,
    SNAPSHOTTING,
    STRATEGIES,
    Checkpoints,
    HeldSnapshot,
    PlanConfig,
    Report,
    Strategy,
    StreamSummary,
    lost_shard_problem,
    reroutes,
    shrinks,
)
from swift.recovery.waiting import quickest, worth_waiting_s

__all__ = [
    "FROM_CHECKPOINT",
    "LOST_SHARDS",
    "SHRINKING",
    "SNAPSHOTTING",
    "STRATEGIES",
    "Assignment",
    "Checkpoints",
    "HeldSnapshot",
    "Help",
    "Plan",
    "PlanConfig",
    "Prediction",
    "RankMeasured",
    "RankPlan",
    "RecoveryGroups",
    "Refusals",
    "Report",
    "Sent",
    "Slot",
    "StageMeasured",
    "Strategy",
    "StreamSummary",
    "finishable",
    "lost_shard_problem",
    "plan",
    "plan_off_log",
    "quickest",
    "reroutes",
    "shrinks",
    "worth_moving",
    "worth_waiting_s",
]
