"""Puts a step in an order: a list scheduler, run with several rules; the shortest step wins.

A worker that is free takes, of what it could begin now: a backward first, because others wait for it and it frees
activations; then a forward, if it may hold more activations; then gradients of weights, for which nobody waits. Without
failures and with 1F1B's activations this is 1F1B.

It always comes to an end. Suppose that some worker holds activations and never goes on. Then it waits for a backward of
the stage behind. At the last stage backwards wait for nobody; so, from there to the front, no worker waits for ever.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from swift.recovery.adaptive.steps import Slot, Step
from swift.recovery.adaptive.work import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Work


class _Rule(NamedTuple):
    """How a worker chooses where it may."""

    key: Callable[[Action, bool], tuple[float, ...]]
    """(action, adopted) -> what comes first."""
    patience: float
    """Gradients of weights are put off if a backward comes within so much of their own time."""


def _by_microbatch(action: Action, _adopted: bool) -> tuple[float, ...]:
    return action.microbatch, action.origin


def _adopted_first(action: Action, adopted: bool) -> tuple[float, ...]:
    return action.microbatch - (1.5 if adopted else 0.0), action.origin


def _adopted_last(action: Action, adopted: bool) -> tuple[float, ...]:
    return action.microbatch + (1.5 if adopted else 0.0), action.origin


_RULES = tuple(
    _Rule(key, patience) for key in (_by_microbatch, _adopted_first, _adopted_last) for patience in (0.0, 0.5)
)


def plan_step(work: Work, *, thorough: bool = True) -> Step:
    """The shortest step that the rules find, the same for the same work wherever it is asked for. `thorough`: with all
    rules; else with the first one."""
    steps = [_Scheduler(work, rule).run() for rule in (_RULES if thorough else _RULES[:1])]
    return min(steps, key=lambda step: step.length)  # the first of equals


class _Scheduler:
    """One run, in the time that the costs say."""

    def __init__(self, work: Work, rule: _Rule) -> None:
        self._work = work
        self._rule = rule
        self._costs = work.costs
        self._stages = work.stages_of()
        self._slots: dict[int, list[Slot]] = {worker: [] for worker in self._stages}
        self._free = dict.fromkeys(self._stages, 0.0)
        """Worker -> when it is."""
        self._held = dict.fromkeys(self._stages, 0)
        self._ready: dict[str, dict[int, list[tuple[tuple[float, ...], Action]]]] = {
            kind: {worker: [] for worker in self._stages} for kind in work.kinds()
        }
        self._coming: dict[int, list[float]] = {worker: [] for worker in self._stages}
        """When backwards become ready, soonest first; some may be over."""
        self._events: list[tuple[float, int, int, Action | None]] = []
        """(time, order, worker, what it can do from then on; None: it is free)."""
        self._count = 0

    def run(self) -> Step:
        work = self._work
        for origin in range(work.origins):
            for microbatch in range(work.microbatches):
                self._at(0.0, Action(FORWARD, 0, origin, microbatch))
        while self._events:
            now = self._events[0][0]
            touched = set()
            while self._events and self._events[0][0] == now:
                _, _, worker, action = heappop(self._events)
                touched.add(worker)
                if action is not None:
                    heappush(self._ready[action.kind][worker], (self._key(worker, action), action))
            for worker in sorted(touched):
                if self._free[worker] <= now:
                    self._choose(worker, now)
        return Step(slots=self._slots)

    def _key(self, worker: int, action: Action) -> tuple[float, ...]:
        own = self._work.owners[action.stage, action.origin]
        adopted = own[0] != own[-1] or any(w != worker for w in own)
        # Of a worker's several stages: forwards of later ones first, as in interleaved schedules.
        return (*self._rule.key(action, adopted), -action.stage)

    def _at(self, when: float, action: Action) -> None:
        worker = self._work.owners[action.stage, action.origin][action.microbatch]
        self._push(when, worker, action)

    def _push(self, when: float, worker: int, action: Action | None) -> None:
        self._count += 1
        if action is not None and action.kind in (BACKWARD, BACKWARD_INPUT):
            heappush(self._coming[worker], when)
        heappush(self._events, (when, self._count, worker, action))

    def _choose(self, worker: int, now: float) -> None:
        action = self._next(worker, now)
        if action is None:
            return
        if action.kind == FORWARD:
            self._held[worker] += 1
        end = now + self._costs.of(action.kind, action.stage)
        self._slots[worker].append(Slot(now, end, action))
        self._free[worker] = end
        if action.kind == self._work.adds():
            self._held[worker] -= 1
        self._follow(action, worker, end)
        self._push(end, worker, None)

    def _next(self, worker: int, now: float) -> Action | None:
        ready, cap = self._ready, self._work.cap
        for kind in (BACKWARD, BACKWARD_INPUT):
            if kind in ready and ready[kind][worker]:
                return heappop(ready[kind][worker])[1]
        forwards = ready[FORWARD][worker]
        if forwards and (cap is None or self._held[worker] < cap[worker]):
            return heappop(forwards)[1]
        weights = ready[BACKWARD_WEIGHT][worker] if self._work.split else []
        if weights and not self._waits(worker, now, weights[0][1]):
            return heappop(weights)[1]
        return None

    def _waits(self, worker: int, now: float, weights: Action) -> bool:
        """A backward comes soon, and others wait for it."""
        coming = self._coming[worker]
        while coming and coming[0] <= now:
            heappop(coming)
        return bool(coming) and coming[0] - now < self._rule.patience * self._costs.of(
            weights.kind, weights.stage
        )

    def _follow(self, action: Action, worker: int, end: float) -> None:
        """What waits for nothing else from then on."""
        kind, stage, origin, microbatch = action
        work, backward = self._work, BACKWARD_INPUT if self._work.split else BACKWARD
        if kind == FORWARD:
            if stage + 1 < work.stages:
                self._send(worker, end, Action(FORWARD, stage + 1, origin, microbatch))
            else:
                self._push(end, worker, Action(backward, stage, origin, microbatch))
        elif kind == backward:
            if stage > 0:
                self._send(worker, end, Action(backward, stage - 1, origin, microbatch))
            if work.split:
                self._push(end, worker, Action(BACKWARD_WEIGHT, stage, origin, microbatch))

    def _send(self, worker: int, end: float, action: Action) -> None:
        to = self._work.owners[action.stage, action.origin][action.microbatch]
        self._push(end if to == worker else end + self._costs.transfer, to, action)
