"""Pure decisions: reports in, plan out. No torch, no I/O, no clock.

`plan()` decides how every rank gets to the agreed version, and why; `plan_without_log()` does the same where a state is
not, or will not be, the one that the log leads to.
"""

from swift_ft.planner.assignment import Assignment, Slot, quickest, worth_waiting_s
from swift_ft.planner.decision import Help, Plan, Prediction, RankPlan
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.plan import Refusals, finishable, plan, plan_without_log
from swift_ft.planner.settings import (
    LOST_SHARDS,
    SETTINGS,
    STRATEGIES,
    PlanConfig,
    Setting,
    lost_shard_problem,
    reroutes,
    shrinks,
)
from swift_ft.planner.types import (
    Checkpoints,
    HeldSnapshot,
    RankMeasured,
    Report,
    Sent,
    StageMeasured,
    Strategy,
    StreamSummary,
)

__all__ = [
    "LOST_SHARDS",
    "SETTINGS",
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
    "Setting",
    "Slot",
    "StageMeasured",
    "Strategy",
    "StreamSummary",
    "finishable",
    "lost_shard_problem",
    "plan",
    "plan_without_log",
    "quickest",
    "reroutes",
    "shrinks",
    "worth_waiting_s",
]
