"""Pure decisions: reports in, plan out. No torch, no I/O, no clock.

`plan()` says how every rank gets to the agreed version, and why.
"""

from swift.recovery.groups import RecoveryGroups
from swift.recovery.measured import RankMeasured, Sent, StageMeasured
from swift.recovery.plan import plan
from swift.recovery.types import (
    STRATEGIES,
    Checkpoints,
    Help,
    Layout,
    Plan,
    PlanConfig,
    RankPlan,
    Refusals,
    Report,
    Strategy,
    StreamSummary,
)

__all__ = [
    "STRATEGIES",
    "Checkpoints",
    "Help",
    "Layout",
    "Plan",
    "PlanConfig",
    "RankMeasured",
    "RankPlan",
    "RecoveryGroups",
    "Refusals",
    "Report",
    "Sent",
    "StageMeasured",
    "Strategy",
    "StreamSummary",
    "plan",
]
