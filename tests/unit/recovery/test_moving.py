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


def found(
    shape: tuple[int, int],
    measured: dict[int, RankMeasured],
    lost: dict[int, int],
    version: int,
    movable: dict[int, list[int]] | None = None,
) -> Move | None:
    """By default every place may become any other."""
    return worth_moving(
        measured,
        stage_groups=shape[0],
        replicas=shape[1],
        lost=lost,
        version=version,
        movable={to: list(measured) for to in lost} if movable is None else movable,
    )


def test_two_losses_at_a_stage_become_one_at_each_of_two() -> None:
    lost = {6: 10, 7: 12}
    measured = job(3, 4, set(lost), [0.1, 0.1, 0.1], 8)
    saved_s = 0.1 * 8 * (4 / 2 - 4 / 3)
    steps = int(2 * (GENERATION_S + 1.0) / saved_s) + 1
    assert found((3, 4), measured, lost, 11 + steps) is None, "not yet"
    assert found((3, 4), measured, lost, 12 + steps) == Move(0, 6)


def test_the_quickest_stage_bears_it() -> None:
    lost = {0: 0, 1: 0}
    measured = job(3, 4, set(lost), [0.1, 0.1, 0.03], 8)
    assert found((3, 4), measured, lost, 999) == Move(8, 0)


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
    measured = job(stages, replicas, set(lost), seconds, 8)
    assert found((stages, replicas), measured, dict.fromkeys(lost, 0), 10**6) is None


def test_nothing_is_moved_without_a_place() -> None:
    lost = {0: 0, 1: 0}
    measured = job(3, 3, set(lost), [0.1, 0.1, 0.1], 8)
    assert found((3, 3), measured, lost, 10**6, {}) is None
    assert found((3, 3), measured, lost, 10**6, {1: [7]}) == Move(7, 1)
    assert found((3, 3), measured, lost, 10**6, {1: [2]}) is None, "of its own stage"
    assert found((3, 3), measured, {}, 10**6, {}) is None


@pytest.mark.parametrize("stage", range(3))
def test_nothing_is_moved_before_all_stages_are_measured(stage: int) -> None:
    """Those without a loss as well: a coordinator that begins anew hears of one stage after the other."""
    lost = {0: 0, 1: 0}
    measured = job(3, 3, set(lost), [0.1, 0.1, 0.1], 8)
    movable = {to: list(measured) for to in lost}
    for rank in [rank for rank in measured if rank // 3 == stage]:
        del measured[rank]
    assert found((3, 3), measured, lost, 10**6, movable) is None
    assert found((3, 3), {}, lost, 10**6, movable) is None


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
        move = found((stages, replicas), measured, lost, 10**9)
        if move is None:
            break
        del lost[move.to]
        lost[move.rank] = 0
    else:
        pytest.fail("it never ends")
    assert all(after <= before * (1 - LEAST) + 1e-9 for before, after in pairwise(seen))
