"""Pure decisions: reports in, plan out. No torch, no I/O, no clock.

`plan()` decides how every rank gets to the agreed version, and why; `without_log()` does the same where a state is not,
or will not be, the one that the log leads to.
"""

from swift_ft.planner.assignment import Assignment, Slot
from swift_ft.planner.decision import Help, Plan, Prediction, RankPlan
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.plan import Refusals, finishable, plan, without_log
from swift_ft.planner.replay_cost import quickest, worth_waiting_s
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
    HeldSnapshot,
    Report,
    Strategy,
    StreamSummary,
)

__all__ = [
    "LOST_SHARDS",
    "SETTINGS",
    "STRATEGIES",
    "Assignment",
    "HeldSnapshot",
    "Help",
    "Plan",
    "PlanConfig",
    "Prediction",
    "RankPlan",
    "RecoveryGroups",
    "Refusals",
    "Report",
    "Setting",
    "Slot",
    "Strategy",
    "StreamSummary",
    "finishable",
    "lost_shard_problem",
    "plan",
    "quickest",
    "reroutes",
    "shrinks",
    "without_log",
    "worth_waiting_s",
]
