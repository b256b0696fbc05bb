"""Steps one after the other, and staggered."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from swift_ft.planner.schedule import Costs, Step, Work, period, plan_step, shortest_period
from tests.unit.recovery.adaptive.works import one_each, one_f_one_b_length, works


def busiest(work: Work) -> float:
    """What the busiest worker computes in a step."""
    busy: dict[int, float] = {}
    for worker, action in work.actions():
        busy[worker] = busy.get(worker, 0.0) + work.costs.of(action.kind, action.stage)
    return max(busy.values())


@settings(max_examples=40, deadline=None)
@given(works())
def test_staggered_is_no_slower_and_nobody_computes_two_things_at_a_time(work: Work) -> None:
    step = plan_step(work)
    plain = period(work, step, staggered=False)
    assert plain <= step.length + 1e-6
    staggered = period(work, step, staggered=True)
    assert busiest(work) - 1e-6 <= work.period_bound() <= staggered + 1e-6
    assert staggered <= plain + 1e-6


def test_with_memory_enough_the_busiest_worker_has_no_pause() -> None:
    for origins, stages, microbatches, lost in ((4, 4, 8, [(1, 0)]), (4, 4, 8, [(0, 0)])):
        work = one_each(origins, stages, microbatches, lost=lost, split=True, factor=2)
        assert shortest_period(work, staggered=True) == pytest.approx(busiest(work))
        assert busiest(work) / one_f_one_b_length(work) == 1.0


def test_with_1f1b_s_memory_it_gains_nothing() -> None:
    work = one_each(4, 4, 8, lost=[(1, 0)], split=True)
    assert shortest_period(work, staggered=True) == shortest_period(work, staggered=False)


def test_a_stage_of_which_one_replica_is_late_waits_for_it() -> None:
    work = one_each(2, 1, 4, lost=[])
    work = replace(work, owners={(0, 0): (0, 0, 0, 0), (0, 1): (0, 1, 1, 1)}, cap=None)
    assert period(work, plan_step(work), staggered=True) == 15


def test_transfers_count() -> None:
    work = replace(one_each(1, 2, 1), costs=Costs(transfer=5.0))
    assert period(work, plan_step(work), staggered=False) == 1 + 5 + 3 + 5 + 2


def test_orders_that_come_to_no_end_are_refused() -> None:
    work = one_each(1, 1, 1)
    slots = {0: list(reversed(plan_step(work).slots[0]))}
    with pytest.raises(ValueError, match="never comes"):
        period(work, Step(slots=slots), staggered=False)
