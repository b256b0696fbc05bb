"""Who computes what in a call that lacks ranks, planned by what stages take (`swift_ft.train.rerouted_call`)."""

import math
import random
from statistics import mean

import pytest
import torch

from swift_ft.planner import Assignment
from swift_ft.planner.schedule import Step, Timed, Work, period
from swift_ft.train.rerouted_call import Routes, Seconds, costs_of, equal_seconds, plan, seconds_of

NAN = math.nan
NOT_KNOWN = (NAN, NAN)
Told = tuple[float, float]


def told(*ranks: list[Told]) -> list[torch.Tensor]:
    return [torch.tensor(rank, dtype=torch.float64) for rank in ranks]


def test_each_stage_takes_the_median_of_those_that_know_it() -> None:
    ranks = told(
        [(1.0, 2.0), NOT_KNOWN],
        [(3.0, 5.0), NOT_KNOWN],
        [(2.0, 4.0), NOT_KNOWN],
        [NOT_KNOWN, (6.0, 8.0)],
    )
    assert seconds_of(ranks) == ((0.5, 0.0, 1.0), (1.5, 1.0, 1.0)), "in units of the mean forward, 4 s"


def test_weights_are_half_of_a_backward_and_all_of_the_first_stages() -> None:
    assert seconds_of(told([(1.0, 2.0), (1.0, 3.0)])) == ((1.0, 0.0, 2.0), (1.0, 1.5, 1.5))
    assert seconds_of(told([(1.0, 2.0)])) == ((1.0, 1.0, 1.0),)


@pytest.mark.parametrize("second", [NOT_KNOWN, (1.0, 0.0), (0.0, 1.0), (math.inf, 1.0)])
def test_all_stages_are_alike_if_nobody_knows_one_of_them(second: Told) -> None:
    assert seconds_of(told([(1.0, 2.0), NOT_KNOWN], [NOT_KNOWN, second])) == equal_seconds(2)


def routes(seed: int, seconds: Seconds | None, *, split: bool) -> tuple[Routes, Seconds]:
    """Of a job with one loss, drawn by `seed`; and what its stages take in truth."""
    draw = random.Random(seed)
    stages, origins, count = draw.choice([2, 3, 4]), draw.choice([2, 3, 4]), draw.choice([4, 8])
    full = Assignment.grid(stages * origins, replicas=origins)
    lost = draw.randrange(stages * origins)
    held = {slot: member for slot, member in full.members.items() if slot != lost}
    assignment = full.held_by(held).rerouted()
    owners = {}
    for stage in range(stages):
        for origin in range(origins):
            mine = [assignment.owner(stage, origin, mb) for mb in range(count)]
            owners[stage, origin] = tuple(slot for slot in mine if slot is not None)
    forwards = [draw.uniform(0.5, 3.0) for _ in range(stages)]
    true = tuple(
        (forward, forward * draw.uniform(0.5, 1.5), forward * draw.uniform(0.5, 1.5)) for forward in forwards
    )
    work = Work(
        stages=stages,
        origins=origins,
        microbatches=count,
        owners=owners,
        split=split,
        costs=costs_of(seconds or true),
        cap={slot: stages - assignment.slots[slot].stage_group for slot in assignment.occupied},
    )
    return plan(work, staggered=False), true


def takes(work: Work, orders: Routes) -> float:
    """A step in these orders, where parts take what they take in `work`."""
    return period(work, _as_step(orders), staggered=False)


def _as_step(planned: Routes) -> Step:
    """Only the order of each worker's parts counts."""
    orders = planned.orders.items()
    return Step(slots={worker: [Timed(0.0, 0.0, action) for action in order] for worker, order in orders})


@pytest.mark.parametrize("split", [False, True])
def test_what_stages_take_never_makes_a_step_longer_and_shorter_on_average(split: bool) -> None:
    ratios = []
    for seed in range(40):
        by_measure, true = routes(seed, None, split=split)
        alike, _ = routes(seed, equal_seconds(len(true)), split=split)
        ratios.append(takes(by_measure.work, by_measure) / takes(by_measure.work, alike))
    assert max(ratios) <= 1 + 1e-9
    assert mean(ratios) < 0.99
