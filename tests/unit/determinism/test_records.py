"""Lines of JSON -> runs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from swift.determinism.records import Begin, Record, line, processes_of, run_of
from tests.unit.determinism.runs import process, record, run


def lines_of(records: list[Record], rank: int = 0, at: float = 1.0) -> list[str]:
    return [line(Begin(rank=rank, at=at, rng={"torch": "a"}, hash="h")), *map(line, records)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 3))
def test_what_is_written_is_read(steps: list[int], rank: int) -> None:
    records = [record(step, rank) for step in steps]
    (read,) = processes_of(lines_of(records, rank))
    assert read.rank == rank
    assert [r.values for r in read.records] == [r.values for r in records]
    assert [(r.step, r.norms, r.settings) for r in read.records] == [
        (r.step, r.norms, r.settings) for r in records
    ]


def test_a_torn_last_line_is_left_out() -> None:
    lines = lines_of([record(0), record(1)])
    lines[-1] = lines[-1][:-10]
    (read,) = processes_of(lines)
    assert [r.step for r in read.records] == [0]


def test_processes_stand_in_the_order_in_which_they_began() -> None:
    read = run_of([lines_of([record(4)], 0, at=9.0), lines_of([record(0)], 0, at=2.0)])
    assert [p.records[0].step for p in read.processes] == [0, 4]


def test_a_step_that_was_done_again_counts_as_it_was_done_last() -> None:
    again = record(1, buffers={"mean": "new"})
    found = run(process([record(0), record(1)]), process([again], at=1.0))
    assert found.at(0, 1) is again
    assert found.num_steps == 2
    assert [r.step for r in found.history(0)] == [0, 1]
