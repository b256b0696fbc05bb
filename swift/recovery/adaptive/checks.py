"""Whether a step does its work: rules of their own, which any order is held to."""

import itertools
from collections import Counter

from swift.recovery.adaptive.steps import Step
from swift.recovery.adaptive.work import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Work

_SLACK = 1e-9


def problems(work: Work, step: Step) -> list[str]:
    """What is wrong with it, a line each; none: every action is done once, by its owner, when it can be."""
    found = []
    wanted = Counter(work.actions())
    done = Counter((worker, slot.action) for worker, slots in step.slots.items() for slot in slots)
    found += [f"worker {worker} has not to do {action}" for worker, action in done - wanted]
    found += [f"worker {worker} does not do {action}" for worker, action in wanted - done]
    if found:
        return found
    at = {slot.action: (worker, slot) for worker, slots in step.slots.items() for slot in slots}
    for worker, slots in step.slots.items():
        for before, behind in itertools.pairwise(slots):
            if behind.begin < before.end - _SLACK:
                found.append(f"worker {worker} begins {behind.action} before {before.action} is over")
        found += _of_activations(work, worker, [slot.action for slot in slots])
    for action, (worker, slot) in at.items():
        if slot.end - slot.begin < work.costs.of(action.kind, action.stage) - _SLACK:
            found.append(f"{action} takes too little time")
        for needed in needs(work, action):
            source, given = at[needed]
            arrives = given.end + (work.costs.transfer if source != worker else 0.0)
            if slot.begin < arrives - _SLACK:
                found.append(f"{action} begins at {slot.begin:g}, and {needed} is there at {arrives:g}")
    return found


def out_of_order(work: Work, step: Step) -> list[tuple[int, int, int]]:
    """(worker, stage, origin) whose gradients are not added in the order of microbatches. These may come to the worker
    by several ways. Their sum has other bits, unless the run keeps those that come early apart."""
    found = []
    for worker, order in step.orders().items():
        newest: dict[tuple[int, int], int] = {}
        for kind, stage, origin, microbatch in order:
            if kind == work.adds():
                if newest.get((stage, origin), -1) > microbatch:
                    found.append((worker, stage, origin))
                newest[stage, origin] = microbatch
    return sorted(set(found))


def needs(work: Work, action: Action) -> list[Action]:
    """What must be over before it begins."""
    kind, stage, origin, microbatch = action
    backward = BACKWARD_INPUT if work.split else BACKWARD
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, origin, microbatch)] if stage else []
    if kind == BACKWARD_WEIGHT:
        return [Action(BACKWARD_INPUT, stage, origin, microbatch)]
    own = [Action(FORWARD, stage, origin, microbatch)]
    return own + ([Action(backward, stage + 1, origin, microbatch)] if stage + 1 < work.stages else [])


def _of_activations(work: Work, worker: int, order: list[Action]) -> list[str]:
    if work.cap is None:
        return []
    held = most = 0
    for action in order:
        held += (action.kind == FORWARD) - (action.kind == work.adds())
        most = max(most, held)
    cap = work.cap[worker]
    return [f"worker {worker} holds {most} activations, and may hold {cap}"] if most > cap else []
