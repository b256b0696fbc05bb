"""Lines of JSON -> runs, and which step a process that was started again begins with."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.lab.determinism.verify import Record, Run, placed, run_of
from tests.unit.determinism.runs import digest, record, run, steps, whole


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 3))
def test_what_is_written_is_read(numbers: list[int], rank: int) -> None:
    records = [record(step, rank, last=step == 50) for step in numbers]
    read = run_of(["".join(each.line() for each in records)])
    assert read.processes == (records,)
    assert [list(each.seen) for each in read.processes[0]] == [list(each.seen) for each in records]


def test_a_torn_last_line_is_left_out() -> None:
    lines = "".join(each.line() for each in steps(0, 2))
    assert run_of([lines[:-10], lines[:5]]) == run(steps(0, 1))


def test_a_step_that_was_done_again_counts_as_it_was_done_last() -> None:
    again = record(1, changed={"mean": b"new"})
    found = run(steps(0, 2), [again])
    assert found.at(0, 1) is again
    assert found.num_steps == 2
    assert [r.step for r in found.history(0)] == [0, 1]


# --- a process that was started again ---


def started(first: Record, behind: int, rank: int = 0) -> Sequence[Record]:
    """As its recorder has it: steps are counted from 0."""
    records = [first, *steps(first.step + 1, behind, rank)]
    return [replace(each, step=number) for number, each in enumerate(records)]


def first_step(base: Run, process: Sequence[Record]) -> int:
    return placed(base, run(process)).processes[0][0].step


BESIDE = ("mean", "lr", "momentum")


@pytest.mark.parametrize("first", range(8))
def test_the_parameters_tell_also_where_all_else_is_that_of_step_0(first: int) -> None:
    fresh = {word: digest(word, 0) for word in BESIDE}
    assert first_step(whole(8), started(record(first, changed=fresh), first + 3)) == first
    assert first_step(whole(8), started(record(first, without=BESIDE), first + 1)) == first


@pytest.mark.parametrize("first", range(8))
def test_without_parameters_the_rest_of_the_state_tells(first: int) -> None:
    assert first_step(whole(8), started(record(first, changed={"w": b"rounded"}), first + 1)) == first


def test_without_any_state_the_steps_that_are_left_tell() -> None:
    """What is equal at every step (frozen weights) tells nothing."""

    def bare(records: Sequence[Record]) -> Sequence[Record]:
        changed = {"w": b"other"} | dict.fromkeys(BESIDE, b"other")
        return [record(each.step, changed=changed) for each in records]

    assert first_step(whole(10), bare(started(record(7), 10))) == 7
    assert first_step(whole(4), bare(started(record(0), 9))) == 0, "more steps than there are"


def test_of_equal_states_the_one_with_the_steps_that_are_left_is_it() -> None:
    """A step that changed nothing (a scaler skipped it)."""
    same = {word: digest(word, 3) for word in ("w", *BESIDE)}
    base = run([*steps(0, 4), record(4, changed=same), record(5)])
    assert first_step(base, started(record(4, changed=same), 6)) == 4


@pytest.mark.parametrize("first", [0, 3, 6])
def test_all_ranks_of_a_start_are_moved_alike(first: int) -> None:
    processes = [
        started(record(first, rank, {"w": b"lost"} if rank else {}), first + 2, rank) for rank in (0, 1)
    ]
    found = placed(whole(8, ranks=2), run(*processes))
    assert [[each.step for each in process] for process in found.processes] == [[first, first + 1]] * 2
