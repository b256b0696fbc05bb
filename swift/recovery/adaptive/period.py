"""What a step takes if the next one follows: all stages at once, or each as soon as its own gradients are there.

A stage has all gradients of a step when the last of its replicas has added its last one. Then they are reduced, and the
stage steps. *Staggered*, it begins the next step at once; else it waits until all stages have stepped. So staggered
steps overlap: what counts is the time from one step to the next, once it is the same for each.

This is a model; `swift.runtime.staggering` is how a run does it.
"""

from typing import NamedTuple

from swift.recovery.adaptive.checks import needs
from swift.recovery.adaptive.scheduler import found_steps
from swift.recovery.adaptive.steps import Step
from swift.recovery.adaptive.work import Action, Work

STEPS_MAX = 64
_SLACK = 1e-9


def period(work: Work, step: Step, *, staggered: bool, reduction: float = 0.0) -> float:
    """From one step's end to the next one's, in the steady state; every worker keeps to its order. `reduction` is what
    it takes to reduce a stage's gradients and to step.

    Raises ValueError if the orders come to no end.
    """
    walk = _Walk(work, step)
    begin = [0.0] * work.stages
    clocks = [0.0] * len(step.slots)
    ends = [0.0]
    for _ in range(STEPS_MAX if staggered else 1):
        before, clocks_before = begin, clocks
        clocks, stepped = walk.once(begin, clocks)
        begin = [end + reduction for end in stepped]
        ends.append(max(begin))
        if not staggered:
            return ends[-1]
        moved = [new - old for new, old in zip([*begin, *clocks], [*before, *clocks_before], strict=True)]
        if max(moved) - min(moved) < _SLACK:
            return moved[0]
    half = STEPS_MAX // 2  # it may come again after several steps only
    return (ends[-1] - ends[-1 - half]) / half


def shortest_period(work: Work, *, staggered: bool, reduction: float = 0.0) -> float:
    """Of the steps that the rules find."""
    return min(period(work, step, staggered=staggered, reduction=reduction) for step in found_steps(work))


class _Part(NamedTuple):
    worker: int
    stage: int
    takes: float
    adds: bool
    waits: tuple[tuple[int, float], ...]
    """(part's number, what its message takes)."""


class _Walk:
    """All workers' orders as one, in which nothing comes before what it waits for."""

    def __init__(self, work: Work, step: Step) -> None:
        self._stages = work.stages
        self._parts: list[_Part] = []
        workers = list(step.slots)
        index = {worker: n for n, worker in enumerate(workers)}
        orders = step.orders()
        number: dict[Action, tuple[int, int]] = {}  # (part's number, worker)
        at, waiting = dict.fromkeys(workers, 0), list(workers)
        blocked: dict[Action, list[int]] = {}
        while waiting:
            worker = waiting.pop()
            while at[worker] < len(orders[worker]):
                action = orders[worker][at[worker]]
                needed = needs(work, action)
                missing = next((other for other in needed if other not in number), None)
                if missing is not None:
                    blocked.setdefault(missing, []).append(worker)
                    break
                waits = tuple(
                    (part, work.costs.transfer if source != worker else 0.0)
                    for part, source in map(number.__getitem__, needed)
                )
                takes, adds = work.costs.of(action.kind, action.stage), action.kind == work.adds()
                number[action] = len(self._parts), worker
                self._parts.append(_Part(index[worker], action.stage, takes, adds, waits))
                at[worker] += 1
                waiting += blocked.pop(action, [])
        if blocked:
            raise ValueError(f"{next(iter(blocked))} is waited for and never comes")

    def once(self, begin: list[float], clocks: list[float]) -> tuple[list[float], list[float]]:
        """(by worker: when it is free, by stage: when its last gradient is added)."""
        clocks = list(clocks)
        over: list[float] = []
        last = [0.0] * self._stages
        for worker, stage, takes, adds, waits in self._parts:
            end = max(clocks[worker], begin[stage])
            for part, message in waits:
                end = max(end, over[part] + message)
            end += takes
            clocks[worker] = end
            over.append(end)
            if adds:
                last[stage] = max(last[stage], end)
        return clocks, last
