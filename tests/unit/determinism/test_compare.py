"""Two runs -> the first step and the first value that differ."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from swift.determinism.compare import ABSENT, STEPS, diverge, drawn, unseeded
from swift.determinism.records import (
    BUFFERS,
    GRADIENTS,
    INPUTS,
    KINDS,
    LOSS,
    OUTPUTS,
    PARAMETERS,
    RNG,
    Record,
    Run,
)
from tests.unit.determinism.runs import digest, process, record, run, whole


def changed(step: int, kind: str, rank: int = 0) -> Record:
    name = next(iter(record(step, rank).of(kind)))
    return record(step, rank, **{kind: {name: "other"}})


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 3))
def test_a_run_equals_itself(steps: int, ranks: int) -> None:
    assert diverge(whole(steps, ranks), whole(steps, ranks)) is None


COMPARED = [kind for kind in KINDS if kind != "objects"]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(COMPARED), st.integers(0, 1)), min_size=1, max_size=4
    )
)
def test_the_first_of_all_changes_is_found(changes: list[tuple[int, str, int]]) -> None:
    """By step, then by what leads to what, then by rank; every difference of that step is there."""
    records = {(rank, step): record(step, rank) for rank in (0, 1) for step in range(6)}
    for step, kind, rank in changes:
        known = records[rank, step]
        name = next(iter(known.of(kind)))
        records[rank, step] = replace(known, values={**known.values, kind: {**known.of(kind), name: "other"}})
    other = run(*(process([records[rank, s] for s in range(6)], rank) for rank in (0, 1)))
    found = diverge(whole(6, 2), other)
    assert found is not None
    first = min(changes, key=lambda change: (change[0], KINDS.index(change[1]), change[2]))
    assert (found.step, found.first.kind, found.first.rank) == first
    here = {(kind, rank) for step, kind, rank in changes if step == first[0]}
    assert {(d.kind, d.rank) for d in found.differences} == here


def test_a_step_that_is_done_twice_must_be_equal_both_times() -> None:
    base = whole(4)
    good = process([record(s) for s in range(4)])
    wrong = process([record(0), changed(1, LOSS), record(2), record(3)])
    once = process([record(0), changed(1, LOSS)]), process([record(1), record(2), record(3)], at=1.0)
    assert diverge(base, run(good)) is None
    for other in (run(wrong), run(*once)):
        found = diverge(base, other)
        assert found is not None
        assert (found.step, found.first.kind) == (1, LOSS)


def test_what_is_absent_differs() -> None:
    bare = replace(record(1), values={**record(1).values, BUFFERS: {}})
    found = diverge(whole(2), run(process([record(0), bare])))
    assert found is not None
    assert (found.first.name, found.first.other) == ("mean", ABSENT)
    found = diverge(whole(2), run(process([record(0), record(1, buffers={"more": "1"})])))
    assert found is not None
    assert (found.first.name, found.first.base) == ("more", ABSENT)


def test_an_input_that_a_peer_has_sent_comes_behind_the_peers_outputs() -> None:
    """Though inputs come before outputs: it follows from them."""
    sent = digest("y", 1, 0)

    def world(output: str) -> list[Record]:
        return [
            record(1, 0, outputs={"output 0": output}),
            record(1, 1, inputs={"input 0": output}),
        ]

    base = run(*(process([record(0, r), world(sent)[r]], r) for r in (0, 1)))
    other = run(*(process([record(0, r), world("bad")[r]], r) for r in (0, 1)))
    found = diverge(base, other)
    assert found is not None
    assert [(d.rank, d.kind) for d in found.differences] == [(0, OUTPUTS), (1, INPUTS)]
    assert [d.received for d in found.differences] == [False, True]


def test_generators_count_where_steps_draw_from_them_and_runs_have_them_in_common() -> None:
    base = whole(3)
    assert drawn(base) == {"torch"}
    for name, counts in (("torch", True), ("numpy", False)):
        other = run(process([record(s, rng={name: "x"}) for s in range(3)]))
        assert (diverge(base, other) is not None) == counts
        assert unseeded(base, other) == {name}
        assert diverge(base, other, apart={name}) is None


def test_the_state_at_the_end_is_compared() -> None:
    end = replace(record(3), last=True)
    base = run(process([record(0), record(1), record(2), end]))
    assert diverge(base, base) is None
    other = run(process([record(0), record(1), record(2), replace(changed(3, PARAMETERS), last=True)]))
    found = diverge(base, other)
    assert found is not None
    assert (found.last, found.first.kind) == (True, PARAMETERS)


def test_steps_that_one_run_has_not_done() -> None:
    short, long = whole(3), whole(4)
    found = diverge(long, short)
    assert found is not None
    assert (found.step, found.first.kind, found.first.other) == (3, STEPS, ABSENT)
    assert diverge(long, short, may_lack=lambda step: step == 3) is None
    found = diverge(short, long)
    assert found is not None
    assert (found.step, found.first.base) == (3, ABSENT)


def test_a_difference_comes_before_a_step_that_is_missing() -> None:
    found = diverge(whole(4), run(process([record(0), record(1), changed(2, GRADIENTS)])))
    assert found is not None
    assert (found.step, found.first.kind) == (2, GRADIENTS)


def test_the_record_is_that_of_the_first_difference() -> None:
    other = run(process([record(0), changed(1, RNG)]))
    found = diverge(whole(2), other)
    assert found is not None
    assert found.record is other.processes[0].records[1]
    assert found.base == record(1)


def test_microbatches_that_ranks_compute_for_one_another() -> None:
    base = whole(3, ranks=2)
    lost = process([record(0, 1), record(1, 1)], 1)

    def going_on(*more: str) -> Record:
        inputs = {f"input {n}": value for n, value in enumerate((digest("x", 2, 0), *more))}
        return record(2, 0, inputs=inputs)

    def other(*more: str) -> Run:
        return run(process([record(0), record(1), going_on(*more)]), lost)

    def differs(made: Run, *, shared: bool) -> bool:
        return diverge(base, made, may_lack=lambda step: step == 2, shared=shared) is not None

    assert not differs(other(digest("x", 2, 1)), shared=True)
    assert differs(other(digest("x", 2, 1)), shared=False)
    assert differs(other(digest("x", 1, 1)), shared=True), "the microbatch of another step"
    assert differs(other("wrong"), shared=True)
