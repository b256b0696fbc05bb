"""Which step a process that was started again begins with."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.determinism.alignment import first_step, place
from swift.determinism.records import BUFFERS, HYPERPARAMETERS, OPTIMIZER, PARAMETERS, Process, Record
from tests.unit.determinism.runs import process, record, whole


def started(first: int, steps: int, rank: int = 0, **changed: Mapping[str, str]) -> Process:
    """As its recorder has it: steps are counted from 0."""
    records = [record(first, rank, **changed), *(record(s, rank) for s in range(first + 1, first + steps))]
    return process([replace(r, step=n) for n, r in enumerate(records)], rank, at=1.0)


@settings(deadline=None)
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(1, 4))))
def test_the_parameters_tell(sizes: tuple[int, int, int]) -> None:
    """Whatever else is not restored, and however many steps follow."""
    steps, first, more = sizes
    broken = {kind: {"w.momentum": "none"} for kind in (OPTIMIZER,)}
    assert first_step(whole(steps), [started(first, more, **broken)]) == first


@given(st.integers(1, 7))
@settings(deadline=None)
def test_the_parameters_tell_also_where_all_else_is_that_of_step_0(first: int) -> None:
    fresh = record(0)
    others = {kind: fresh.of(kind) for kind in (OPTIMIZER, BUFFERS, HYPERPARAMETERS)}
    assert first_step(whole(8), [started(first, 8, **others)]) == first


@settings(deadline=None)
@given(st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_without_parameters_the_optimizer_tells(sizes: tuple[int, int]) -> None:
    steps, first = sizes
    assert first_step(whole(steps), [started(first, 1, parameters={"w": "rounded"})]) == first


def stateless(made: Process) -> Process:
    def bare(r: Record) -> Record:
        return replace(r, values={PARAMETERS: {"w": f"other {r.step}", "frozen": r.of(PARAMETERS)["frozen"]}})

    return replace(made, records=tuple(bare(r) for r in made.records))


def test_without_any_state_the_steps_that_are_left_tell() -> None:
    assert first_step(whole(10), [stateless(started(7, 3))]) == 7


def test_who_does_more_steps_than_there_are_begins_at_0() -> None:
    assert first_step(whole(4), [stateless(started(0, 9))]) == 0


@pytest.mark.parametrize("first", [0, 3, 6])
def test_all_ranks_of_a_start_are_moved_alike(first: int) -> None:
    base = whole(8, ranks=2)
    placed = place(base, [started(first, 2, 0, parameters={"w": "lost"}), started(first, 2, 1)])
    assert [[r.step for r in p.records] for p in placed] == [[first, first + 1]] * 2


def test_of_equal_states_the_one_with_the_steps_that_are_left_is_it() -> None:
    """A step that changed nothing (a scaler skipped it)."""
    base = whole(6)
    (only,) = base.processes
    doubled = replace(only.records[3], step=4)
    base = type(base)(processes=(replace(only, records=(*only.records[:4], doubled, only.records[5])),))
    again = replace(started(3, 2), records=(replace(doubled, step=0), replace(only.records[5], step=1)))
    assert first_step(base, [again]) == 4
