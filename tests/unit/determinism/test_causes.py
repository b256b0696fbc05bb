"""The first difference -> its cause. Each case differs from the one that is equal in what makes the cause."""

from collections.abc import Mapping

import pytest

from swift_ft.lab.determinism.verify import Cause, Divergence, Record, Run, diverge, of_chance, of_resumption
from tests.unit.determinism.runs import digest, record, run, steps, whole

STEPS, FIRST = 8, 5


def found(base: Run, other: Run) -> Divergence:
    made = diverge(base, other)
    assert made is not None
    return made


def resumed(first: Record, base: Run | None = None) -> list[Cause]:
    """Of a process that goes on at step FIRST, with this."""
    base = base or whole(STEPS)
    return of_resumption(base, found(base, run(steps(0, FIRST + 1), [first, *steps(FIRST + 1, STEPS)])))


def named(changed: Mapping[str, bytes], **how: Mapping[str, str]) -> list[str]:
    return [cause.name for cause in resumed(record(FIRST, changed=changed, **how))]


OTHER = {"inner y": b"?", "y": b"?", "loss": b"?", "g": b"?"}
"""What follows from whatever differs before it."""


@pytest.mark.parametrize(
    ("changed", "cause", "evidence"),
    [
        (
            {"lr": digest("lr", 0)},
            "scheduler-not-saved",
            "optimizer 0.param_groups.0.lr: the value of step 0",
        ),
        ({"w": b"half"}, "parameters-not-saved", "parameter Net.w: a value that it has in no step"),
        ({"momentum": b"?"}, "optimizer-not-saved", "a value that it has in no step"),
        ({"momentum": digest("mean", FIRST)}, "optimizer-not-saved", "that of buffer Net.mean"),
        ({"mean": digest("mean", 0)}, "buffer-not-saved", "buffer Net.mean: the value of step 0"),
        ({"torch": digest("torch", 0)}, "rng-not-restored", "generator torch: the value of step 0"),
        ({"x": digest("x", 0)}, "data-position", "the value of step 0"),
        ({"x": b"new"}, "data-position", "in no step"),
    ],
)
def test_what_a_step_begins_with(changed: dict[str, bytes], cause: str, evidence: str) -> None:
    """With or without what follows from it."""
    for more in ({}, OTHER):
        made = resumed(record(FIRST, changed=changed | more))
        assert [each.name for each in made] == [cause]
        assert any(evidence in words for words in made[0].evidence), made[0].evidence


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("register(scheduler=...).last_epoch", "object-not-saved"),
        ("iterator of a data loader.0", "data-position"),
        ("attribute.0.count", "hidden-state"),
        ("hyperparameters of an optimizer.0.lr", "scheduler-not-saved"),
        ("the keys of a buffer", "buffer-not-saved"),
    ],
)
def test_what_a_session_knows_of(name: str, cause: str) -> None:
    base = run([record(step, changed={name: b"%d" % step}) for step in range(STEPS)])
    other = run([*base.processes[0][:FIRST], record(FIRST, changed={name: b"?"})])
    [made] = of_resumption(base, found(base, other))
    assert made.name == cause
    assert made.words


def test_inputs_that_are_drawn_follow_from_the_generator() -> None:
    assert named({"torch": b"?", "x": b"new"}) == ["rng-not-restored"]


def test_an_epoch_that_begins_again_is_the_generator_and_the_data_position() -> None:
    assert named({"torch": digest("torch", 0), "x": digest("x", 0)}) == ["rng-not-restored", "data-position"]


def test_several_are_all_named() -> None:
    assert named({"momentum": b"?", "mean": b"?", **OTHER}) == ["buffer-not-saved", "optimizer-not-saved"]


def test_state_that_is_absent() -> None:
    [cause] = resumed(record(FIRST, without=["momentum"]))
    assert cause == Cause("optimizer-not-saved", ("optimizer 0.state.Net.w.momentum: absent",))


def test_results_that_differ_though_all_before_them_is_equal() -> None:
    assert named(OTHER, settings={"threads": "1"}) == ["thread-count"]
    assert named(OTHER, settings={"threads": "2", "precision": "high"}) == ["setting"]
    assert named(OTHER) == named({"g": b"?"}) == named({"inner x": b"?"}) == ["hidden-state"]
    assert named({"mean": b"?"}, settings={"threads": "1"}) == ["buffer-not-saved"]


def test_another_number_of_steps() -> None:
    [cause] = of_resumption(whole(STEPS), found(whole(STEPS), whole(STEPS + 1)))
    assert cause == Cause("other-steps", (f"only the other run has done step {STEPS}",))


# --- without an interruption ---


def chance(second: Record, *apart: str) -> Cause:
    base = whole(STEPS)
    return of_chance(base, found(base, run([record(0), second])), apart)


def test_two_uninterrupted_runs() -> None:
    drawn = chance(record(1, changed={"x": b"?"}), "generator torch", "generator numpy")
    assert drawn == Cause("unseeded-rng", ("other states of torch, which both runs draw from",))
    assert chance(record(1, changed={"x": b"?"}), "generator numpy").name == "unseeded-rng"
    assert chance(record(1, changed={"w": b"?"})).name == "unseeded-rng"
    assert chance(record(1, changed={"g": b"?"})).name == "unordered-reduction"
    assert chance(record(1, changed=OTHER, settings={"threads": "3"})).name == "thread-count"
