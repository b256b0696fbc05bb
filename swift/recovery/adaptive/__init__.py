"""Adaptive pipelines: what the peers of a lost rank compute for it, and in which order (ReCycle, arXiv 2405.14009).

``Work`` is one step of all data-parallel ranks: who computes which microbatch of whose batch at which stage, what each
part takes, and how many activations a rank may hold. ``plan_step`` puts it in an order. ``problems`` checks any order
against the work, by rules that the scheduler does not share.
"""

from swift.recovery.adaptive.checks import problems
from swift.recovery.adaptive.scheduler import plan_step
from swift.recovery.adaptive.steps import Slot, Step
from swift.recovery.adaptive.work import Action, Costs, Work, shared

__all__ = ["Action", "Costs", "Slot", "Step", "Work", "plan_step", "problems", "shared"]
