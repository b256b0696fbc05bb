"""The shortest step of a small work, by an integer program (HiGHS): the list scheduler is judged by it.

Time has whole units. For each action and each unit there is a variable: whether it has begun by then. So precedence is
a comparison of two variables, and the sums over a worker say what it does and holds at a time. Of microbatches that
take the same way, the first one goes first everywhere; others are as good, by another name.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy

from swift_ft.planner.schedule import Action, Step, Timed, Work, needs

_FORWARD = "F"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """What is known of the shortest step."""

    step: Step
    """The shortest that was found."""
    least: float
    """No step is shorter."""

    @property
    def proven(self) -> bool:
        return self.step.length <= self.least


def exact_step(work: Work, listed: Step, *, limit_s: float) -> Exact:
    """Searches at most `limit_s` for a step shorter than `listed`. Times are whole numbers, 1 or more."""
    costs = work.costs
    times = [costs.transfer, *(costs.of(action.kind, action.stage) for _, action in work.actions())]
    assert all(time == int(time) for time in times)
    assert min(times[1:]) >= 1
    least = math.ceil(work.bound() - 1e-9)
    if listed.length <= least:
        return Exact(step=listed, least=least)
    return _Program(work, int(listed.length)).solve(listed, least, limit_s)


class _Program:
    """Of a step that is over within `horizon`."""

    def __init__(self, work: Work, horizon: int) -> None:
        self._work = work
        self._horizon = horizon
        self._owner = {action: worker for worker, action in work.actions()}
        self._takes = {action: int(work.costs.of(action.kind, action.stage)) for action in self._owner}
        self._number = {action: n for n, action in enumerate(self._owner)}
        self.variables = (len(self._number) + 1) * horizon
        self._rows: list[tuple[list[int], list[float], float]] = []
        """(variables, factors, at most)."""
        self._over = len(self._number)
        self._compare()
        self._share()

    def _at(self, number: int, time: int) -> int | None:
        """The variable; None: it cannot have begun."""
        return None if time < 0 else number * self._horizon + min(time, self._horizon - 1)

    def _after(self, behind: int, before: int, lag: int) -> None:
        """What is behind begins `lag` later, or more."""
        for time in range(self._horizon):
            later, sooner = self._at(behind, time), self._at(before, time - lag)
            assert later is not None
            if sooner is None:
                self._rows.append(([later], [1.0], 0.0))
            else:
                self._rows.append(([later, sooner], [1.0, -1.0], 0.0))

    def _compare(self) -> None:
        work = self._work
        for action, number in self._number.items():
            for time in range(self._horizon - 1):
                sooner, later = self._at(number, time), self._at(number, time + 1)
                assert sooner is not None
                assert later is not None
                self._rows.append(([sooner, later], [1.0, -1.0], 0.0))
            for needed in needs(work, action):
                message = int(work.costs.transfer) if self._owner[needed] != self._owner[action] else 0
                self._after(number, self._number[needed], self._takes[needed] + message)
            self._after(self._over, number, self._takes[action])
        for time in range(self._horizon - 1):
            sooner, later = self._at(self._over, time), self._at(self._over, time + 1)
            assert sooner is not None
            assert later is not None
            self._rows.append(([sooner, later], [1.0, -1.0], 0.0))
        alike: dict[tuple[int, ...], tuple[int, int]] = {}
        for origin in range(work.origins):
            for microbatch in range(work.microbatches):
                way = tuple(work.owners[stage, origin][microbatch] for stage in range(work.stages))
                if way in alike:
                    for kind in work.kinds():
                        for stage in range(work.stages):
                            first = Action(kind, stage, *alike[way])
                            self._after(
                                self._number[Action(kind, stage, origin, microbatch)],
                                self._number[first],
                                self._takes[first],
                            )
                alike[way] = origin, microbatch

    def _share(self) -> None:
        """A worker does one thing at a time, and holds so much."""
        for worker in self._work.stages_of():
            own = [action for action, owner in self._owner.items() if owner == worker]
            for time in range(self._horizon):
                self._sum([(action, time, self._takes[action]) for action in own], 1.0)
                if self._work.cap is not None:
                    forwards = [(action, time, None) for action in own if action.kind == _FORWARD]
                    frees = [
                        (action, time - self._takes[action])
                        for action in own
                        if action.kind == self._work.adds()
                    ]
                    self._sum(forwards, float(self._work.cap[worker]), frees)

    def _sum(
        self,
        runs: Sequence[tuple[Action, int, int | None]],
        most: float,
        less: Sequence[tuple[Action, int]] = (),
    ) -> None:
        variables, factors = [], []
        for action, time, takes in runs:
            begun = self._at(self._number[action], time)
            assert begun is not None
            variables.append(begun)
            factors.append(1.0)
            over = None if takes is None else self._at(self._number[action], time - takes)
            if over is not None:
                variables.append(over)
                factors.append(-1.0)
        for action, time in less:
            freed = self._at(self._number[action], time)
            if freed is not None:
                variables.append(freed)
                factors.append(-1.0)
        self._rows.append((variables, factors, most))

    def solve(self, listed: Step, least: int, limit_s: float) -> Exact:
        """The step that was there, or a shorter one."""
        horizon, over = self._horizon, self._over * self._horizon
        # Without callbacks, which nobody uses here: to set them, it prints its name on stdout.
        solver = type("Quiet", (highspy.Highs,), {"enableCallbacks": lambda _: None})()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", limit_s)
        solver.setOptionValue("threads", 1)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.variables, len(self._rows)
        # The more units in which all is over, the shorter. In the last one all has begun.
        model.col_cost_ = [-1.0 if column >= over else 0.0 for column in range(self.variables)]
        model.col_lower_ = [
            1.0 if column < over and column % horizon == horizon - 1 else 0.0
            for column in range(self.variables)
        ]
        model.col_upper_ = [
            0.0 if column >= over and column - over < least else 1.0 for column in range(self.variables)
        ]
        model.row_lower_ = [-highspy.kHighsInf] * len(self._rows)
        model.row_upper_ = [most for _, _, most in self._rows]
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        starts, indices, values = [0], [], []
        for variables, factors, _ in self._rows:
            indices += variables
            values += factors
            starts.append(len(indices))
        matrix.start_, matrix.index_, matrix.value_ = starts, indices, values
        model.integrality_ = [highspy.HighsVarType.kInteger] * self.variables
        solver.passModel(model)
        solver.run()
        found = solver.getInfo()
        # No unit within the horizon: as long as the one that was there.
        proven = least
        if math.isfinite(found.mip_dual_bound):
            proven = max(least, min(horizon, horizon + math.ceil(found.mip_dual_bound - 1e-6)))
        if not -horizon <= found.objective_function_value < -0.5:
            return Exact(step=listed, least=proven)
        return Exact(step=self._step(solver.getSolution().col_value), least=proven)

    def _step(self, values: list[float]) -> Step:
        slots: dict[int, list[Timed]] = {worker: [] for worker in self._work.stages_of()}
        for action, number in self._number.items():
            begun = values[number * self._horizon : (number + 1) * self._horizon]
            begin = float(sum(1 for value in begun if value < 0.5))
            slots[self._owner[action]].append(Timed(begin, begin + self._takes[action], action))
        return Step(slots={worker: sorted(row) for worker, row in slots.items()})
