"""The first difference -> its cause. Each case differs from the one that is equal in what makes the cause."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from swift.determinism import causes
from swift.determinism.causes import of_chance, of_resumption
from swift.determinism.compare import Divergence, diverge
from swift.determinism.records import OPTIMIZER, Begin, Process, Record, Run
from tests.unit.determinism.runs import digest, process, record, run, whole

STEPS, FIRST = 8, 5


def resumed(**changed: Mapping[str, str]) -> Divergence:
    """A process that goes on at step FIRST, with this."""
    return found(whole(STEPS), resuming([record(FIRST, **changed)]))


def resuming(first: Sequence[Record]) -> Run:
    before = process([record(step) for step in range(FIRST + 1)])
    after = [*first, *(record(step) for step in range(FIRST + len(first), STEPS))]
    return run(before, process(after, at=1.0))


def found(base: Run, other: Run) -> Divergence:
    made = diverge(base, other)
    assert made is not None
    return made


def named(divergence: Divergence, base: Run | None = None) -> list[str]:
    return [cause.name for cause in of_resumption(base or whole(STEPS), divergence)]


OTHER = {
    "outputs": {"output 0": digest("y?")},
    "loss": {"loss 0": digest("l?")},
    "gradients": {"w": digest("g?")},
}
"""What follows from whatever differs before it."""


@pytest.mark.parametrize(
    ("changed", "cause", "evidence"),
    [
        ({"hyperparameters": {"lr": "1.0"}}, causes.SCHEDULER, "lr has the value of step 0"),
        ({"hyperparameters": {"lr": "0.7"}}, causes.SCHEDULER, "lr is 0.7, and 0.16666666666666666 unint"),
        ({"parameters": {"w": digest("half")}}, causes.WEIGHTS, "w has a value that it has in no step"),
        ({"optimizer": {"w.momentum": digest("?")}}, causes.MOMENTUM, "in no step"),
        ({"buffers": {"mean": digest("mean", 0)}}, causes.BUFFER, "mean has the value of step 0"),
        ({"rng": {"torch": digest("torch", 0)}}, causes.NOT_RESTORED, "torch has the state of step 0"),
        ({"inputs": {"input 0": digest("x", 0, 0)}}, causes.DATA, "are those of step 0"),
        ({"inputs": {"input 0": digest("new")}}, causes.DATA, "of no step"),
    ],
)
def test_what_a_step_begins_with(changed: dict[str, Mapping[str, str]], cause: str, evidence: str) -> None:
    """With or without what follows from it."""
    for more in ({}, OTHER):
        made = of_resumption(whole(STEPS), resumed(**changed, **more))
        assert [each.name for each in made] == [cause]
        assert any(evidence in words for words in made[0].evidence), made[0].evidence


def test_inputs_that_are_drawn_follow_from_the_generator() -> None:
    changed = {"rng": {"torch": digest("torch", 0)}, "inputs": {"input 0": digest("new")}}
    assert named(resumed(**changed)) == [causes.NOT_RESTORED]


def test_a_generator_from_which_nobody_draws_is_no_cause() -> None:
    changed = {"rng": {"numpy": digest("another")}, "inputs": {"input 0": digest("new")}}
    assert named(resumed(**changed)) == [causes.DATA]


def test_an_epoch_that_begins_again_is_the_data_position_and_the_generator() -> None:
    changed = {"rng": {"torch": digest("torch", 0)}, "inputs": {"input 0": digest("x", 0, 0)}}
    assert named(resumed(**changed)) == [causes.DATA, causes.NOT_RESTORED]


def test_several_are_all_named() -> None:
    changed = {"optimizer": {"w.momentum": digest("?")}, "buffers": {"mean": digest("mean", 0)}}
    assert named(resumed(**changed, **OTHER)) == [causes.MOMENTUM, causes.BUFFER]


def test_state_that_is_absent() -> None:
    bare = replace(record(FIRST), values={**record(FIRST).values, OPTIMIZER: {}})
    made = of_resumption(whole(STEPS), found(whole(STEPS), resuming([bare])))
    assert [(cause.name, cause.evidence) for cause in made] == [(causes.MOMENTUM, ("w.momentum is absent",))]


def test_state_of_another_parameter() -> None:
    def both(step: int, *, swapped: bool) -> Record:
        names = ["v.momentum", "w.momentum"]
        values = [digest(name, step) for name in (reversed(names) if swapped else names)]
        return record(step, optimizer=dict(zip(names, values, strict=True)))

    base = run(process([both(step, swapped=False) for step in range(STEPS)]))
    other = run(process([both(step, swapped=step == FIRST) for step in range(STEPS)]))
    (cause,) = of_resumption(base, found(base, other))
    assert cause.name == causes.HASH
    assert "has the value that v.momentum has" in cause.evidence[0]


def test_a_buffer_that_is_not_persistent_is_named_so() -> None:
    lost = replace(record(FIRST, buffers={"mean": digest("zero")}), unsaved=("mean",))
    (cause,) = of_resumption(whole(STEPS), found(whole(STEPS), resuming([lost])))
    assert "mean is registered with persistent=False" in cause.evidence


def computed(**fields: object) -> list[str]:
    """All that the step begins with is equal."""
    changed = replace(record(FIRST, gradients={"w": digest("g?")}), **fields)
    return named(found(whole(STEPS), resuming([changed])))


def test_results_that_differ_though_all_before_them_is_equal() -> None:
    assert computed(settings={"threads": "1"}) == [causes.THREADS]
    assert computed(settings={"threads": "2", "precision": "high"}) == [causes.SETTING]
    assert computed(norms={"w": 1.0000001}) == [causes.ORDER]
    assert computed(norms={"w": 1.5}) == [causes.HIDDEN]
    assert named(resumed(outputs={"output 0": digest("y?")})) == [causes.HIDDEN]


def test_a_setting_is_no_cause_where_something_before_it_differs() -> None:
    changed = replace(record(FIRST, buffers={"mean": digest("zero")}), settings={"threads": "1"})
    assert named(found(whole(STEPS), resuming([changed]))) == [causes.BUFFER]


def test_another_number_of_steps() -> None:
    base = whole(STEPS)
    assert named(found(base, whole(STEPS - 1)), base) == [causes.STEPS]


def test_what_promises_no_bits_is_the_cause() -> None:
    (cause,) = of_resumption(whole(STEPS), resumed(**OTHER), inexact="--lost-shard drop")
    assert (cause.name, cause.evidence) == (causes.INEXACT, ("--lost-shard drop was asked for, and allowed",))


# --- without an interruption ---


def chance(second: Record, *, hash: str = "1", fixed_by: Sequence[str] = ()) -> str:
    base = whole(STEPS)
    other = run(process([record(0), second], hash=hash))
    return of_chance(base, found(base, other), fixed_by=fixed_by).name


def test_two_uninterrupted_runs() -> None:
    drawn = {"rng": {"torch": digest("?")}, "inputs": {"input 0": digest("new")}}
    assert chance(record(1, **drawn)) == causes.UNSEEDED
    assert chance(record(1, inputs={"input 0": digest("new")})) == causes.UNSEEDED
    assert chance(record(1, gradients={"w": digest("g?")})) == causes.ORDER
    assert chance(replace(record(1, **OTHER), settings={"threads": "3"})) == causes.THREADS
    assert chance(record(1, **OTHER), fixed_by=[causes.THREADS]) == causes.THREADS
    assert chance(record(1, inputs={"input 0": digest("new")}), fixed_by=[causes.HASH]) == causes.HASH


def test_a_generator_that_was_drawn_from_before_the_first_step() -> None:
    """It makes the weights, and is never used again."""

    def begun(state: str) -> Process:
        first = record(0, rng={"numpy": state}, parameters={"w": digest(state)})
        return Process(begin=Begin(rank=0, at=0.0, rng={"numpy": f"fresh {state}"}), records=(first,))

    base, other = run(begun("a")), run(begun("b"))
    cause = of_chance(base, found(base, other))
    assert cause.name == causes.UNSEEDED
    assert "other states of numpy" in cause.evidence[0]


def test_what_is_tried_out() -> None:
    """Only what may be it."""
    base = whole(STEPS)

    def tried(second: Record, hash: str) -> list[str]:
        return causes.candidates(base, found(base, run(process([record(0), second], hash=hash))))

    inputs, drawn = {"inputs": {"input 0": digest("new")}}, {"rng": {"torch": digest("?")}}
    assert tried(record(1, **inputs), "2") == [causes.HASH]
    assert tried(record(1, **inputs), "1") == []
    assert tried(record(1, **OTHER), "2") == [causes.HASH, causes.THREADS]
    assert tried(record(1, **OTHER, **drawn), "2") == []
