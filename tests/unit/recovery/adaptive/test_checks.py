"""The check finds whatever is wrong with a step."""

import math
from dataclasses import replace

import pytest

from swift_ft.planner.schedule import Action, Costs, Step, Timed, Work, plan_step, problems
from tests.unit.recovery.adaptive.works import one_each


@pytest.fixture
def work() -> Work:
    return replace(one_each(2, 2, 2, split=True), costs=Costs(transfer=0.5))


def changed(step: Step, worker: int, at: int, slot: Timed | None) -> Step:
    """With another slot there, or none."""
    slots = {of: list(row) for of, row in step.slots.items()}
    slots[worker][at : at + 1] = [] if slot is None else [slot]
    return Step(slots=slots)


def test_a_planned_step_has_no_problems(work: Work) -> None:
    assert problems(work, plan_step(work)) == []


def test_what_is_left_out_or_done_by_another_is_found(work: Work) -> None:
    step = plan_step(work)
    assert problems(work, changed(step, 0, 0, None)) == ["worker 0 does not do 0F0@0"]
    other = Timed(0.0, 1.0, Action("F", 0, 1, 0))
    assert problems(work, changed(step, 0, 0, other)) == [
        "worker 0 has not to do 0F0@1",
        "worker 0 does not do 0F0@0",
    ]


def test_two_things_at_a_time_are_found(work: Work) -> None:
    step = plan_step(work)
    second = step.slots[0][1]
    early = Timed(second.begin - 0.5, second.end - 0.5, second.action)
    assert "worker 0 begins 0F1@0 before 0F0@0 is over" in problems(work, changed(step, 0, 1, early))


def test_too_little_time_is_found(work: Work) -> None:
    step = plan_step(work)
    first = step.slots[0][0]
    short = Timed(first.begin, first.end - 0.1, first.action)
    assert problems(work, changed(step, 0, 0, short)) == ["0F0@0 takes too little time"]


def test_what_begins_before_its_message_is_there_is_found(work: Work) -> None:
    step = plan_step(work)
    first = step.slots[2][0]
    assert first.begin == 1.5
    early = Timed(1.0, 2.0, first.action)
    assert "1F0@0 begins at 1, and 0F0@0 is there at 1.5" in problems(work, changed(step, 2, 0, early))


def test_too_many_activations_are_found(work: Work) -> None:
    step = plan_step(replace(work, cap=None))
    assert problems(replace(work, cap=None), step) == []
    assert problems(replace(work, cap=dict.fromkeys(range(4), 1)), step) == [
        f"worker {worker} holds 2 activations, and may hold 1" for worker in range(4)
    ]


def test_works_that_can_be_nobody_s_are_refused(work: Work) -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        replace(work, microbatches=0)
    with pytest.raises(ValueError, match="has not one owner for each microbatch"):
        replace(work, owners={**work.owners, (0, 0): (0,)})
    with pytest.raises(ValueError, match="must be able to hold"):
        replace(work, cap={0: 1, 1: 1, 2: 1, 3: 0})
    with pytest.raises(ValueError, match="stage group 1 has nobody left"):
        one_each(2, 2, 2, lost=[(1, 0), (1, 1)])
    for part in (-1e-9, math.inf, math.nan):
        with pytest.raises(ValueError, match="a number of at least 0"):
            replace(work, costs=Costs(backward_input=(part, 1.0)))
