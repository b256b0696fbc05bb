"""The list scheduler beside the shortest step there is, and beside the bound."""

import sys
from dataclasses import replace

import pytest

from swift.errors import UsageError
from swift.plan.exact import exact_step
from swift.recovery.adaptive import Costs, Work, plan_step, problems
from tests.unit.recovery.adaptive.works import Lost, one_each

KNOWN = [
    # D, P, M, lost; planned and shortest: fused, split, split with twice the activations
    (2, 2, 2, [(0, 0)], (15, 15, 13, 13, 12, 12)),
    (2, 2, 4, [(0, 0)], (27, 27, 25, 25, 24, 24)),
    (2, 2, 4, [(1, 0)], (27, 27, 26, 26, 25, 25)),
    (2, 3, 3, [(1, 0)], (24, 24, 21, 21, 19, 19)),
    (3, 2, 3, [(0, 0)], (18, 18, 16, 16, 15, 15)),
    (3, 3, 3, [], (15, 15, 13, 13, 12, 12)),
    (3, 3, 4, [(1, 0)], (26, 24, 22, 21, 19, 19)),
]


def works(origins: int, stages: int, microbatches: int, lost: Lost) -> list[Work]:
    return [
        one_each(origins, stages, microbatches, lost=lost, split=split, factor=factor)
        for split, factor in ((False, 1), (True, 1), (True, 2))
    ]


@pytest.mark.parametrize(("origins", "stages", "microbatches", "lost", "known"), KNOWN)
def test_planned_steps_are_the_shortest_or_nearly(
    origins: int, stages: int, microbatches: int, lost: Lost, known: tuple[int, ...]
) -> None:
    pytest.importorskip("highspy")
    found: list[float] = []
    for work in works(origins, stages, microbatches, lost):
        planned = plan_step(work)
        exact = exact_step(work, planned, limit_s=60)
        assert exact.proven
        assert problems(work, exact.step) == []
        assert work.bound() <= exact.least == exact.step.length <= planned.length
        found += [planned.length, exact.step.length]
    assert tuple(found) == known


def test_a_step_that_is_as_short_as_the_bound_needs_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("highspy")
    monkeypatch.setattr("swift.plan.exact._Program", None)
    work = one_each(4, 4, 8)
    planned = plan_step(work)
    assert exact_step(work, planned, limit_s=1).step is planned


def test_without_time_it_says_what_it_knows() -> None:
    pytest.importorskip("highspy")
    work = one_each(3, 3, 4, lost=[(0, 0)], split=True)
    planned = plan_step(work)
    exact = exact_step(work, planned, limit_s=0.01)
    assert work.bound() <= exact.least <= exact.step.length <= planned.length


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    work = one_each(4, 4, 8, lost=[(0, 0)])
    planned = plan_step(work)
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(UsageError, match=r"pip install 'swift-ft\[exact\]'"):
        exact_step(work, planned, limit_s=1)
    monkeypatch.undo()
    pytest.importorskip("highspy")
    with pytest.raises(UsageError, match="whole numbers, 1 or more"):
        exact_step(replace(work, costs=Costs(forward=(1.5,))), planned, limit_s=1)
    large = one_each(8, 8, 16, lost=[(0, 0)])
    with pytest.raises(UsageError, match="give fewer stages"):
        exact_step(large, plan_step(large), limit_s=1)
