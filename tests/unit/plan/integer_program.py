"""The shortest step of a small work, by an integer program (HiGHS): the list scheduler is judged by it.

Time has whole units. For each action and each unit there is a variable: whether it has begun by then. So precedence is
a comparison of two variables, and the sums over a worker say what it does and holds at a time. Of microbatches that
take the same way, the first one goes first everywhere; others are as good, by another name.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import highspy

from swift_ft.planner.schedule import Action, Step, Timed, Work, needs

_FORWARD = "F"
_LIMIT_S = 100.0


def exact_step(work: Work, listed: Step) -> Step:
    """The shortest step: `listed`, if no other one is shorter. Times are whole numbers, 1 or more."""
    costs = work.costs
    times = [costs.transfer, *(costs.of(action.kind, action.stage) for _, action in work.actions())]
    assert all(time == int(time) for time in times)
    assert min(times[1:]) >= 1
    least = math.ceil(work.bound() - 1e-9)
    return listed if listed.length <= least else _Program(work, int(listed.length)).solve(listed, least)


class _Program:
    """Of a step that is over within `horizon`."""

    def __init__(self, work: Work, horizon: int) -> None:
        self._work, self._horizon = work, horizon
        self._owner = {action: worker for worker, action in work.actions()}
        self._takes = {action: int(work.costs.of(action.kind, action.stage)) for action in self._owner}
        # Without callbacks, which nobody uses here: to set them, it prints its name on stdout.
        self._solver = type("Quiet", (highspy.Highs,), {"enableCallbacks": lambda _: None})()
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        self._over = self._rising()
        self._begun = {action: self._rising() for action in self._owner}
        for action, begun in self._begun.items():
            self._solver.addConstr(begun[horizon - 1] == 1)
            self._after(self._over, begun, self._takes[action])
            for needed in needs(work, action):
                message = int(work.costs.transfer) if self._owner[needed] != self._owner[action] else 0
                self._after(begun, self._begun[needed], self._takes[needed] + message)
        self._order_alike()
        self._share()

    def _rising(self) -> list[Any]:
        """By each unit of time: whether something has begun by then."""
        row = [self._solver.addBinary() for _ in range(self._horizon)]
        for sooner, later in itertools.pairwise(row):
            self._solver.addConstr(sooner <= later)
        return row

    def _after(self, behind: list[Any], before: list[Any], lag: int) -> None:
        """What is behind begins `lag` later, or more."""
        for time, later in enumerate(behind):
            self._solver.addConstr(later <= (before[time - lag] if time >= lag else 0))

    def _order_alike(self) -> None:
        work = self._work
        alike: dict[tuple[int, ...], tuple[int, int]] = {}
        for origin, microbatch in itertools.product(range(work.origins), range(work.microbatches)):
            way = tuple(work.owners[stage, origin][microbatch] for stage in range(work.stages))
            if way in alike:
                for kind, stage in itertools.product(work.kinds(), range(work.stages)):
                    first = Action(kind, stage, *alike[way])
                    second = Action(kind, stage, origin, microbatch)
                    self._after(self._begun[second], self._begun[first], self._takes[first])
            alike[way] = origin, microbatch

    def _share(self) -> None:
        """A worker does one thing at a time, and holds so much."""
        for worker in self._work.stages_of():
            own = [action for action, owner in self._owner.items() if owner == worker]
            for time in range(self._horizon):
                begun = [self._begun[action][time] for action in own]
                self._solver.addConstr(sum(begun) - sum(self._done(own, time)) <= 1)
                if self._work.cap is not None:
                    held = [self._begun[action][time] for action in own if action.kind == _FORWARD]
                    freed = self._done([action for action in own if action.kind == self._work.adds()], time)
                    self._solver.addConstr(sum(held) - sum(freed) <= self._work.cap[worker])

    def _done(self, actions: Sequence[Action], time: int) -> list[Any]:
        return [
            self._begun[action][time - self._takes[action]]
            for action in actions
            if time >= self._takes[action]
        ]

    def solve(self, listed: Step, least: int) -> Step:
        """The step that was there, or a shorter one. No step is shorter than `least`."""
        for over in self._over[:least]:
            self._solver.addConstr(over == 0)
        self._solver.setOptionValue("time_limit", _LIMIT_S)
        self._solver.maximize(sum(self._over))  # the more units in which all is over, the shorter
        found = self._solver.getInfo()
        if math.isfinite(found.mip_dual_bound):
            least = max(least, self._horizon - math.floor(found.mip_dual_bound + 1e-6))
        step = listed  # if there is no unit within the horizon
        if 0.5 < found.objective_function_value <= self._horizon:
            slots: dict[int, list[Timed]] = {worker: [] for worker in self._work.stages_of()}
            for action, begun in self._begun.items():
                begin = float(sum(self._solver.val(each) < 0.5 for each in begun))
                slots[self._owner[action]].append(Timed(begin, begin + self._takes[action], action))
            step = Step(slots={worker: sorted(row) for worker, row in slots.items()})
        assert step.length <= least, f"not proven within {_LIMIT_S} s"
        return step
