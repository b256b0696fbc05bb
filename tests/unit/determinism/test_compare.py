"""Two runs -> the first step and the first value that differ."""

from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.lab.determinism.verify import Divergence, Run, diverge, drawn, unseeded
from tests.unit.determinism.runs import SEEN, digest, record, run, steps, whole


def differs(base: Run, other: Run, **how: bool) -> Divergence:
    found = diverge(base, other, **how)
    assert found is not None
    return found


def named(found: Divergence) -> list[str]:
    words = {seen: word for word, seen in SEEN.items()}
    return [words[difference.seen] for difference in found.differences]


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 3))
def test_a_run_equals_itself(count: int, ranks: int) -> None:
    assert diverge(whole(count, ranks), whole(count, ranks)) is None


COUNTED = [word for word in SEEN if word != "numpy"]
"""Nobody draws from this one."""


def place(change: tuple[int, str, int]) -> tuple[int, int, int, int]:
    step, word, rank = change
    groups = (COUNTED[: COUNTED.index("x")], ["x", "inner x"], ["inner y", "y"], ["loss"], ["g"])
    return step, next(n for n, group in enumerate(groups) if word in group), rank, COUNTED.index(word)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(COUNTED), st.integers(0, 1)), min_size=1, max_size=4
    )
)
def test_the_first_of_all_changes_is_found(changes: list[tuple[int, str, int]]) -> None:
    """By step, then by what leads to what, then by rank; every difference of that step and rank is there."""

    def changed(step: int, rank: int) -> dict[str, bytes]:
        return {word: b"other" for at, word, of in changes if (at, of) == (step, rank)}

    other = run(*([record(step, rank, changed(step, rank)) for step in range(6)] for rank in (0, 1)))
    found = differs(whole(6, 2), other)
    step, word, rank = min(changes, key=place)
    assert (found.record.step, found.record.rank, named(found)[0]) == (step, rank, word)
    assert set(named(found)) == set(changed(step, rank))


def test_a_step_that_is_done_twice_must_be_equal_both_times() -> None:
    base, wrong = whole(4), record(1, changed={"loss": b"?"})
    assert diverge(base, run(steps(0, 2), steps(1, 4))) is None
    for other in (run([record(0), wrong, *steps(2, 4)]), run([record(0), wrong], steps(1, 4))):
        found = differs(base, other)
        assert (found.record.step, named(found)) == (1, ["loss"])


def test_what_is_absent_differs() -> None:
    [lost] = differs(whole(2), run([record(0), record(1, without=["mean"])])).differences
    assert (lost.seen, lost.now) == (SEEN["mean"], None)
    [more] = differs(whole(2), run([record(0), record(1, changed={"buffer more": b"1"})])).differences
    assert (more.seen.name, more.before) == ("buffer more", None)


def test_an_input_that_a_peer_has_sent_comes_behind_the_peers_outputs() -> None:
    """Though inputs come before outputs: it follows from them."""

    def world(sent: bytes) -> Run:
        return run([record(0), record(1, changed={"y": sent})], [record(0, 1), record(1, 1, {"x": sent})])

    found = differs(world(b"good"), world(b"bad"))
    assert (found.record.rank, named(found)) == (0, ["y"])


def test_generators_count_where_steps_draw_from_them_and_runs_have_them_in_common() -> None:
    base = whole(3)
    assert drawn(base) == {"generator torch"}
    for word, counts in (("torch", True), ("numpy", False)):
        other = run([record(step, changed={word: b"x"}) for step in range(3)])
        name = SEEN[word].name
        assert (diverge(base, other) is not None) == counts
        assert unseeded(base, other) == {name}
        assert diverge(base, other, apart={name}) is None


def test_the_state_at_the_end_is_compared_but_for_what_is_drawn_behind_the_last_step() -> None:
    base = run([*steps(0, 3), record(3, last=True)])
    assert diverge(base, run([*steps(0, 3), record(3, changed={"torch": b"?"}, last=True)])) is None
    assert diverge(base, run([*steps(0, 2), record(2, last=True)])) is None, "of another step: nobody has it"
    found = differs(base, run([*steps(0, 3), record(3, changed={"w": b"?"}, last=True)]))
    assert (found.record.last, named(found)) == (True, ["w"])


def test_a_step_that_only_one_run_has_done() -> None:
    found = differs(whole(3), whole(4))
    assert (found.record.step, found.base, found.differences) == (3, None, ())
    found = differs(whole(3), run([record(0), record(1, changed={"g": b"?"}), *steps(2, 4)]))
    assert (found.record.step, named(found)) == (1, ["g"])


def test_microbatches_that_ranks_compute_for_one_another_are_compared_by_what_comes_of_them() -> None:
    base = whole(3, ranks=2)

    def going_on(**changed: bytes) -> Run:
        taken = {"x": digest("x", 2, 1), "y": digest("y", 2, 1)}
        return run([*steps(0, 2), record(2, changed=taken | changed)], steps(0, 2, 1))

    assert diverge(base, going_on(), shared=True) is None
    assert named(differs(base, going_on())) == ["x", "y"]
    assert named(differs(base, going_on(g=b"?"), shared=True)) == ["g"]
