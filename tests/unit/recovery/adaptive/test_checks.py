"""The check finds whatever is wrong with a step."""

import math
from dataclasses import replace

import pytest

from swift_ft.planner.schedule import Action, Costs, Step, Timed, Work, plan_step
from tests.unit.recovery.adaptive.works import one_each, problems


@pytest.fixture
def work() -> Work:
    return replace(one_each(2, 2, 2, split=True), costs=Costs(transfer=0.5))


def changed(step: Step, worker: int, at: int, slot: Timed | None) -> Step:
    """With another slot there, or none."""
    slots = {of: list(row) for of, row in step.slots.items()}
    slots[worker][at : at + 1] = [] if slot is None else [slot]
    return Step(slots=slots)


def test_whatever_is_wrong_is_found(work: Work) -> None:
    step = plan_step(work)
    first, second, first_of_next = *step.slots[0][:2], step.slots[2][0]
    assert problems(work, step) == []
    assert problems(work, changed(step, 0, 0, None)) == ["other actions are done, or by others"]
    other = Timed(0.0, 1.0, Action("F", 0, 1, 0))
    assert problems(work, changed(step, 0, 0, other)) == ["other actions are done, or by others"]
    early = Timed(second.begin - 0.5, second.end - 0.5, second.action)
    assert "worker 0 does two things at a time" in problems(work, changed(step, 0, 1, early))
    short = Timed(first.begin, first.end - 0.1, first.action)
    assert problems(work, changed(step, 0, 0, short)) == ["0F0@0 takes too little time"]
    assert first_of_next.begin == 1.5
    early = Timed(1.0, 2.0, first_of_next.action)
    assert "1F0@0 begins before 0F0@0 is there" in problems(work, changed(step, 2, 0, early))
    step = plan_step(replace(work, cap=None))
    assert problems(replace(work, cap=dict.fromkeys(range(4), 1)), step) == [
        f"worker {worker} holds too many activations" for worker in range(4)
    ]


def test_works_that_can_be_nobody_s_are_refused(work: Work) -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        replace(work, microbatches=0)
    with pytest.raises(ValueError, match="has not one owner for each microbatch"):
        replace(work, owners={**work.owners, (0, 0): (0,)})
    with pytest.raises(ValueError, match="must be able to hold"):
        replace(work, cap={0: 1, 1: 1, 2: 1, 3: 0})
    with pytest.raises(ValueError, match="nobody is left of stage group 1"):
        one_each(2, 2, 2, lost=[(1, 0), (1, 1)])
    for part in (-1e-9, math.inf, math.nan):
        with pytest.raises(ValueError, match="a number of at least 0"):
            replace(work, costs=Costs(backward_input=(part, 1.0)))
