"""Any work gets an order that does it, within memory, whatever the run's own delays are."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.planner.schedule import Action, Costs, Step, Work, plan_step
from tests.unit.recovery.adaptive.works import (
    losses,
    one_each,
    one_f_one_b_length,
    problems,
    shared,
    works,
)


def run(work: Work, step: Step, seed: int) -> int:
    """Walks the orders with blocking receives and asynchronous sends. Each part and each message takes any time.
    Returns how many actions were done when nobody could go on."""
    chance = random.Random(seed)
    orders = {worker: list(order) for worker, order in step.orders().items()}
    at = {action: worker for worker, order in orders.items() for action in order}
    clock = dict.fromkeys(orders, 0.0)
    over: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for worker in chance.sample(sorted(orders), len(orders)):
            for action in list(orders[worker]):
                waited = waited_for(work, action)
                if not all(needed in over for needed in waited):
                    break
                arrives = [
                    over[needed] + (0.0 if at[needed] == worker else chance.expovariate(1.0))
                    for needed in waited
                ]
                clock[worker] = max([clock[worker], *arrives]) + chance.expovariate(1.0)
                over[orders[worker].pop(0)] = clock[worker]
                moved = True
    return len(over)


def waited_for(work: Work, action: Action) -> list[Action]:
    """Written from the description of a pipeline; `needs` is not asked."""
    kind, stage, origin, microbatch = action
    if kind == "F":
        return [] if stage == 0 else [Action("F", stage - 1, origin, microbatch)]
    if kind == "W":
        return [Action("I", stage, origin, microbatch)]
    waited = [Action("F", stage, origin, microbatch)]
    if stage < work.stages - 1:
        waited.append(Action(kind, stage + 1, origin, microbatch))
    return waited


@settings(max_examples=150, deadline=None)
@given(works(), st.integers(0, 2**32))
def test_any_work_is_done_in_order_within_memory(work: Work, seed: int) -> None:
    step = plan_step(work)
    done = Counter(slot.action for slots in step.slots.values() for slot in slots)
    kinds = "FIW" if work.split else "FB"
    cells = [
        (stage, origin, microbatch)
        for stage in range(work.stages)
        for origin in range(work.origins)
        for microbatch in range(work.microbatches)
    ]
    assert done == Counter(Action(kind, *cell) for kind in kinds for cell in cells)
    assert problems(work, step) == []
    assert step.length >= work.bound() - 1e-9
    assert run(work, step, seed) == sum(done.values())


def test_a_run_that_cannot_end_is_noticed() -> None:
    work = one_each(2, 2, 2)
    step = plan_step(work)
    slots = {worker: list(row) for worker, row in step.slots.items()}
    slots[0].insert(0, slots[0].pop())
    assert run(work, Step(slots=slots), 1) < 16


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 2), (4, 4), (4, 8), (5, 13)])
@pytest.mark.parametrize("origins", [1, 3])
def test_without_losses_it_is_1f1b(origins: int, stages: int, microbatches: int) -> None:
    work = one_each(origins, stages, microbatches)
    step = plan_step(work)
    for stage in range(stages):
        for origin in range(origins):
            warm = min(stages - stage, microbatches)
            order = [("F", m) for m in range(warm)]
            for m in range(microbatches):
                order.append(("B", m))
                if m + warm < microbatches:
                    order.append(("F", m + warm))
            found = step.orders()[stage * origins + origin]
            assert [(action.kind, action.microbatch) for action in found] == order
    assert step.length == one_f_one_b_length(work) == work.bound()


FIGURES = [
    # D, P, M, lost: fused, split, split with twice the activations; in failure-free 1F1B steps
    (4, 4, 8, [(1, 0)], (1.46, 1.16, 1.04)),
    (4, 8, 16, [(1, 0), (1, 1)], (1.88, 1.56, 1.42)),
    (2, 4, 8, [(3, 0)], (1.73, 1.64, 1.61)),
    (2, 4, 8, [(0, 0)], (1.73, 1.58, 1.46)),
]


@pytest.mark.parametrize(("origins", "stages", "microbatches", "lost", "most"), FIGURES)
def test_steps_are_as_short_as_they_were(
    origins: int,
    stages: int,
    microbatches: int,
    lost: list[tuple[int, int]],
    most: tuple[float, ...],
) -> None:
    found = []
    for split, factor in ((False, 1), (True, 1), (True, 2)):
        work = one_each(origins, stages, microbatches, lost=lost, split=split, factor=factor)
        found.append(plan_step(work).length / one_f_one_b_length(work))
    assert all(length <= limit for length, limit in zip(found, most, strict=True)), found


@settings(max_examples=60, deadline=None)
@given(works(lossless=True))
def test_without_losses_replicas_are_alike(work: Work) -> None:
    step = plan_step(replace(work, cap=None))
    groups = len(step.slots) // work.origins
    for group in range(groups):
        rows = [
            [(slot.begin, slot.action.kind, slot.action.stage, slot.action.microbatch) for slot in row]
            for worker, row in step.slots.items()
            if worker // work.origins == group
        ]
        assert all(row == rows[0] for row in rows)


@settings(max_examples=60, deadline=None)
@given(losses(2, 5), st.integers(1, 6))
def test_those_that_are_left_share_evenly(lost: list[tuple[int, int]], microbatches: int) -> None:
    work = one_each(5, 2, microbatches, lost=lost)
    for group in range(2):
        counts = [count[group] for count in work.counts().values() if group in count]
        assert sum(counts) == 5 * microbatches
        assert max(counts) - min(counts) <= 1


def test_the_bound_of_one_worker_is_all_that_it_computes() -> None:
    owners = shared([[0]], 2, 3, [(0, 1)])
    work = Work(stages=1, origins=2, microbatches=3, owners=owners, costs=Costs(forward=(2.0,)))
    assert work.bound() == plan_step(work).length == 6 * 4


def test_the_bound_knows_how_long_an_activation_is_held() -> None:
    work = one_each(1, 4, 8, split=True)
    work = replace(work, cap={0: 1, 1: 1, 2: 1, 3: 1})
    # One microbatch at a time: forward and backward through all stages, and the weights of the first.
    assert work.bound() == plan_step(work).length == 8 * 9


def test_an_easy_plan_needs_one_rule() -> None:
    work = one_each(3, 3, 6, lost=[(0, 2)], split=True)
    assert plan_step(work).length <= plan_step(work, thorough=False).length
    assert problems(work, plan_step(work, thorough=False)) == []
