"""Which calls of schedules can be carried out without some ranks (`swift.runtime.rerouting`), as far as it shows before
they are called."""

from collections.abc import Sequence
from typing import Any

from swift.runtime import _torch
from swift.runtime.rerouted_call import MESSAGES_MAX
from swift.runtime.shared_replay.actions import Action, unordered


def problem_of(schedule: Any, dp_size: int, *, exact_gradients: bool) -> str:
    """Why calls of this schedule cannot be; empty: they can. `dp_size`: of the full world."""
    actions = _torch.schedule_actions(schedule)
    if actions is None:
        return "nobody knows what it computes in which order"
    held = list(_torch.schedule_stages(schedule))
    order, count = [Action(*each) for each in actions], _torch.schedule_microbatches(schedule)
    if problem := unordered(order, [stage.stage_index for stage in held], count):
        return problem
    parameters = [parameter for stage in held for parameter in set(stage.submod.parameters())]
    if len(set(parameters)) < len(parameters):
        return "two stages of a rank share a parameter, whose gradients cannot be kept apart by microbatch"
    if exact_gradients and any(parameter.is_complex() for parameter in parameters):
        # torch adds 1 * b to a: a number that changes no bit of what it is added to does not exist then.
        return "a parameter is complex: sums of complex gradients in parts have other zeros"
    messages = held[0].num_stages * dp_size * count
    return "" if messages <= MESSAGES_MAX else f"{messages} messages of a step cannot be told apart"


def hooked_parameter(stages: Sequence[Any]) -> str:
    """The name of one with a hook that is called when a gradient has been added up; empty: there is none. A lost rank's
    peers add those of their microbatches apart from each other."""
    named = (pair for stage in stages for pair in stage.submod.named_parameters())
    return next((name for name, parameter in named if _torch.told_of_sums(parameter)), "")
