"""Adaptive pipelines: what the peers of a lost rank compute for it, and in which order (ReCycle, arXiv 2405.14009).

``Work`` is one step of all data-parallel ranks: who computes which microbatch of whose batch at which stage, what each
part takes, and how many activations a rank may hold. ``plan_step`` puts it in an order. ``problems`` checks any order
against the work, by rules that the scheduler does not share. ``Plans`` makes plans ahead, one for all losses that are
alike; ``move`` says where losses had better be. ``period`` is what a step takes between others.
"""

from swift.recovery.adaptive.checks import out_of_order, problems
from swift.recovery.adaptive.normalize import (
    Counts,
    JobShape,
    Planned,
    Plans,
    canonical,
    even,
    move,
    one_f_one_b,
)
from swift.recovery.adaptive.period import period, shortest_period
from swift.recovery.adaptive.scheduler import found_steps, plan_step
from swift.recovery.adaptive.steps import Step, Timed
from swift.recovery.adaptive.work import Action, Costs, Work, shared

__all__ = [
    "Action",
    "Costs",
    "Counts",
    "JobShape",
    "Planned",
    "Plans",
    "Step",
    "Timed",
    "Work",
    "canonical",
    "even",
    "found_steps",
    "move",
    "one_f_one_b",
    "out_of_order",
    "period",
    "plan_step",
    "problems",
    "shared",
    "shortest_period",
]
