"""Pure decisions: reports in, plan out. No torch, no I/O, no clock.

`plan()` says how every rank gets to the agreed version, and why.
"""

from swift.recovery.groups import RecoveryGroups
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
    "RankPlan",
    "RecoveryGroups",
    "Refusals",
    "Report",
    "Strategy",
    "StreamSummary",
    "plan",
]
