"""When a loss is moved to another stage, and to which (`swift.recovery.moving`)."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.recovery import RankMeasured
from swift.recovery.measured import StageMeasured
from swift.recovery.moving import LEAST, Move, worth_moving
from swift.recovery.waiting import GENERATION_S


def rank(stage: int, microbatches: int, seconds: float, step_s: float = 1.0) -> RankMeasured:
    stages = (StageMeasured(stage=stage, forward_s=seconds / 3, backward_s=2 * seconds / 3),)
    return RankMeasured(
        step=9, steps=5, microbatches=microbatches, step_s=step_s, update_s=0.0, stages=stages
    )


def job(
    stages: int, replicas: int, lost: set[int], seconds: list[float], count: int
) -> dict[int, RankMeasured]:
    """What those that are left have measured, while peers share what lost ranks would have computed."""
    losses = Counter(each // replicas for each in lost)
    return {
        each: rank(
            each // replicas,
            count * replicas // (replicas - losses[each // replicas]),
            seconds[each // replicas],
        )
        for each in range(stages * replicas)
        if each not in lost
    }


def everybody(measured: dict[int, RankMeasured], lost: dict[int, int]) -> dict[int, list[int]]:
    return {to: list(measured) for to in lost}


def test_two_losses_at_a_stage_become_one_at_each_of_two() -> None:
    lost = {6: 10, 7: 12}
    measured = job(3, 4, set(lost), [0.1, 0.1, 0.1], 8)
    saved_s = 0.1 * 8 * (4 / 2 - 4 / 3)
    steps = int(2 * (GENERATION_S + 1.0) / saved_s) + 1
    movable = everybody(measured, lost)
    assert worth_moving(measured, replicas=4, lost=lost, version=11 + steps, movable=movable) is None, (
        "not yet"
    )
    assert worth_moving(measured, replicas=4, lost=lost, version=12 + steps, movable=movable) == Move(0, 6)


def test_the_quickest_stage_bears_it() -> None:
    lost = {0: 0, 1: 0}
    measured = job(3, 4, set(lost), [0.1, 0.1, 0.03], 8)
    found = worth_moving(measured, replicas=4, lost=lost, version=999, movable=everybody(measured, lost))
    assert found == Move(8, 0)


@pytest.mark.parametrize(
    ("stages", "replicas", "lost", "seconds"),
    [
        (2, 2, [0], [0.1, 0.1]),  # it would be the same elsewhere
        (3, 3, [0, 3], [0.1, 0.1, 0.1]),  # they are spread already
        (2, 3, [0, 1, 3], [0.1, 0.1]),  # and the other stage would have one left
        (2, 4, [0], [0.9, 0.1]),  # by what is measured it would be quicker, and back again perhaps
        (3, 4, [0, 1, 4], [0.9, 0.1, 1.3]),  # the third stage would take as long, but for a twentieth
    ],
)
def test_nothing_is_moved_for_nothing(
    stages: int, replicas: int, lost: list[int], seconds: list[float]
) -> None:
    since = dict.fromkeys(lost, 0)
    measured = job(stages, replicas, set(lost), seconds, 8)
    movable = everybody(measured, since)
    assert worth_moving(measured, replicas=replicas, lost=since, version=10**6, movable=movable) is None


def test_nothing_is_moved_without_a_place_or_a_measure() -> None:
    lost = {0: 0, 1: 0}
    measured = job(3, 3, set(lost), [0.1, 0.1, 0.1], 8)
    late = 10**6
    assert worth_moving(measured, replicas=3, lost=lost, version=late, movable={}) is None
    assert worth_moving(measured, replicas=3, lost=lost, version=late, movable={1: [7]}) == Move(7, 1)
    assert worth_moving(measured, replicas=3, lost=lost, version=late, movable={1: [2]}) is None, (
        "of its own stage"
    )
    del measured[2]
    assert worth_moving(measured, replicas=3, lost=lost, version=late, movable={1: [7]}) is None
    assert worth_moving(measured, replicas=3, lost={}, version=late, movable={}) is None


@given(
    st.integers(1, 4),
    st.integers(2, 5),
    st.lists(st.floats(0.001, 1.0), min_size=4, max_size=4),
    st.data(),
)
def test_moves_come_to_an_end_and_each_makes_steps_shorter(
    stages: int, replicas: int, seconds: list[float], data: st.DataObject
) -> None:
    """And no stage loses its last rank."""
    counts = [data.draw(st.integers(0, replicas - 1)) for _ in range(stages)]
    lost = {stage * replicas + n: 0 for stage, count in enumerate(counts) for n in range(count)}
    seen = []
    for _ in range(stages * replicas):
        measured = job(stages, replicas, set(lost), seconds, 60)
        losses = Counter(each // replicas for each in lost)
        assert all(losses[stage] < replicas for stage in range(stages))
        longest = max(seconds[stage] * 60 * replicas / (replicas - losses[stage]) for stage in range(stages))
        fixed = sum(seconds[:stages]) - max(seconds[:stages])
        seen.append(longest + fixed)
        move = worth_moving(
            measured, replicas=replicas, lost=lost, version=10**9, movable=everybody(measured, lost)
        )
        if move is None:
            break
        del lost[move.to]
        lost[move.rank] = 0
    else:
        pytest.fail("it never ends")
    assert all(after <= before * (1 - LEAST) + 1e-9 for before, after in pairwise(seen))
