"""Pipelines whose ranks share a lost one's microbatches (trainers/shrinking_pipeline.py): real processes, real SIGKILL.
What the bits must be is computed by plain torch in one process, which knows nothing of the session.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_shrink import named, pids
from tests.integration.test_shrink_pipelines import (
    check_bits,
    check_one_step_at_most,
    lose_and_return,
    lose_several,
    run,
)
from tests.integration.trainer_world import Run

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
MICROBATCHES = 4
"""Of the trainer."""
PHASES = ("forward", "backward", "reduce", "optimizer", "idle")


def computed(outcome: Run) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(step, lost slot's stage group and origin as one number) -> (microbatch, who has computed it), once for each."""
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for event in named(outcome, "adopted_step"):
        for microbatch in event["microbatches"]:
            found.setdefault((event["step"], event["origin"]), set()).add((microbatch, event["rank"]))
    return {key: sorted(pairs) for key, pairs in found.items()}


@pytest.mark.parametrize(
    ("shape", "lost", "phase"),
    [
        ((2, 3), 1, "backward"),
        *(pytest.param((2, 2), lost, phase, marks=MATRIX) for lost in range(4) for phase in PHASES),
        pytest.param((4, 2), 6, "reduce", marks=MATRIX),
        pytest.param((4, 3), 7, "forward", marks=MATRIX),
    ],
)
def test_the_peers_of_its_stage_share_its_microbatches(
    shape: tuple[int, int], lost: int, phase: str, tmp_path: Path
) -> None:
    fault = {"rank": lost, "step": 5, "phase": phase, "microbatch": 1}
    outcome = run(tmp_path, shape, [fault], strategy="adaptive")

    assert [e["rank"] for e in named(outcome, "left_vacant")] == [lost]
    stages, replicas = shape
    stage, origin = divmod(lost, replicas)
    peers = [stage * replicas + peer for peer in range(replicas) if peer != origin]
    for (_, of), pairs in computed(outcome).items():
        assert of == origin
        assert [microbatch for microbatch, _ in pairs] == list(range(MICROBATCHES)), "each by one rank"
        assert {rank for _, rank in pairs} == set(peers[:MICROBATCHES]), "and all of them take part"
    planned = {str(event["seconds"]) for event in named(outcome, "planned_by")}
    assert len(planned) == 1, "all plan by the same times"
    for rank in set(range(stages * replicas)) - {lost}:
        assert len(pids(outcome, rank)) == 1, "survivors keep their processes"
    check_one_step_at_most(outcome)
    check_bits(outcome, shape, {lost})


@pytest.mark.parametrize(
    ("shape", "faults"),
    [
        # Then some ranks compute gradients of a microbatch before those of the one before it.
        pytest.param(
            (2, 3),
            [{"rank": 0, "step": 4, "phase": "reduce"}, {"rank": 4, "step": 4, "phase": "reduce"}],
            marks=MATRIX,
        ),
        # No pipeline is whole after the second one. Gradients of weights are computed apart by then.
        ((2, 2), [{"rank": 0, "step": 4, "phase": "reduce"}, {"rank": 3, "step": 7, "phase": "weights"}]),
        pytest.param(
            (4, 2),
            [
                {"rank": 0, "step": 3, "phase": "backward", "microbatch": 1},
                {"rank": 3, "step": 5, "phase": "weights", "microbatch": 2},
                {"rank": 6, "step": 7, "phase": "optimizer"},
            ],
            marks=MATRIX,
        ),
    ],
)
def test_several_losses(shape: tuple[int, int], faults: list[dict[str, Any]], tmp_path: Path) -> None:
    check_one_step_at_most(lose_several(shape, faults, tmp_path, "adaptive"))


def test_a_stage_of_which_nobody_is_left_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    """The others keep their processes, and wait for two."""
    faults = [{"rank": rank, "step": 6, "phase": "forward", "microbatch": 1, "hold": True} for rank in (2, 3)]
    outcome = run(tmp_path, (2, 2), faults, max_restarts=2, strategy="adaptive")
    assert [len(pids(outcome, rank)) for rank in range(4)] == [1, 1, 2, 2]
    used = {each["strategy"] for plan in named(outcome, "plan") for each in plan["ranks"]}
    assert "CHECKPOINT" in used
    check_bits(outcome, (2, 2), set())


@pytest.mark.parametrize(
    ("shape", "lost", "phase"),
    [
        ((2, 2), 1, "optimizer"),
        pytest.param((2, 2), 3, "backward", marks=MATRIX),
        pytest.param((2, 3), 4, "forward", marks=MATRIX),
        pytest.param((4, 2), 4, "reduce", marks=MATRIX),
    ],
)
def test_one_that_comes_back_makes_the_world_full_again(
    shape: tuple[int, int], lost: int, phase: str, tmp_path: Path
) -> None:
    check_one_step_at_most(lose_and_return(shape, lost, phase, tmp_path, "adaptive"))


@pytest.mark.matrix
@pytest.mark.parametrize(("shape", "dies"), [((2, 3), 3), ((2, 3), 4), ((2, 2), 3), ((4, 3), 3), ((2, 4), 5)])
def test_a_loss_while_one_comes_back(shape: tuple[int, int], dies: int, tmp_path: Path) -> None:
    """Of the one that gives it the state, or of itself."""
    lost = shape[1] + 1
    faults = [{"rank": lost, "step": 4, "phase": "reduce"}, {"rank": dies, "phase": "copy"}]
    outcome = run(tmp_path, shape, faults, "waits", max_restarts=2, strategy="adaptive")
    assert sorted(e["rank"] for e in named(outcome, "left_vacant")) == sorted([lost, dies])
    check_bits(outcome, shape, set())


def test_what_the_trainer_sums_over_its_pipeline_is_named(tmp_path: Path) -> None:
    """Nobody has the lost rank's part of it; the weights do not depend on it, but the session cannot know."""
    outcome = run(tmp_path, (2, 2), [{"rank": 3, "step": 5, "phase": "idle"}], "sums", strategy="adaptive")
    check_bits(outcome, (2, 2), {3}, exact=False)


@pytest.mark.parametrize(("habit", "splits"), [("adds", False), pytest.param("asks", True, marks=MATRIX)])
def test_backwards_are_split_where_that_gives_the_same_bits(habit: str, splits: bool, tmp_path: Path) -> None:
    outcome = run(tmp_path, (2, 2), [{"rank": 2, "step": 5, "phase": "reduce"}], habit, strategy="adaptive")
    assert {e["all"] for e in named(outcome, "splits_backward")} == {splits}
    check_bits(outcome, (2, 2), {2}, habit)


@pytest.mark.matrix
def test_what_forwards_change_in_modules_is_not_changed_by_those_for_others(tmp_path: Path) -> None:
    fault = {"rank": 2, "step": 5, "phase": "idle"}
    outcome = run(tmp_path, (2, 2), [fault], "counts", strategy="adaptive")
    check_bits(outcome, (2, 2), {2}, "counts")


@pytest.mark.matrix
@pytest.mark.parametrize("habit", ["alternates", "ramps"])
@pytest.mark.parametrize(
    ("shape", "faults"),
    [
        ((2, 2), [{"rank": 2, "step": 5, "phase": "backward", "microbatch": 2}]),
        ((2, 3), [{"rank": 0, "step": 4, "phase": "idle"}]),
        ((4, 3), [{"rank": 3, "step": 3, "phase": "reduce"}, {"rank": 7, "step": 6, "phase": "forward"}]),
    ],
)
def test_a_trainer_with_two_schedules(
    shape: tuple[int, int], faults: list[dict[str, Any]], habit: str, tmp_path: Path
) -> None:
    """The second one is called in turn with the first, or for the first time while ranks are missing."""
    check_one_step_at_most(lose_several(shape, faults, tmp_path, "adaptive", habit))


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        pytest.param("twice", "calls the schedule more than once", marks=MATRIX),
        pytest.param("scales", "changes gradients between schedule.step and their reduction", marks=MATRIX),
        pytest.param(
            "counts first", "communicates over its pipeline before it calls the schedule", marks=MATRIX
        ),
        ("hides", "the gradient of '0.weight' of stage 0 for the batch of rank 1 has other bits"),
        pytest.param("remembers", "must not depend on earlier ones", marks=MATRIX),
        pytest.param(
            "tallies", "the state of register(seen=...) for the batch of rank 2 has other bits", marks=MATRIX
        ),
        pytest.param("clamps", "a hook that is called when a gradient has been added up", marks=MATRIX),
        pytest.param("unregistered", "call session.register(scaler=scaler) before session.run", marks=MATRIX),
        pytest.param("apart", "that some ranks have enabled and others not", marks=MATRIX),
    ],
)
def test_what_nobody_could_do_for_a_lost_rank_is_refused_in_the_first_step(
    habit: str, words: str, tmp_path: Path
) -> None:
    refused = run(tmp_path, (2, 2), [], habit, code_wanted=2, strategy="adaptive")
    assert words in refused["output"], refused["output"]
    assert not named(refused, "step_end")


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["adaptive", "shrink"])
def test_batches_of_a_lost_rank_come_in_the_order_that_it_had(strategy: str, tmp_path: Path) -> None:
    """Of torch's DataLoader, which shuffles for each pipeline otherwise: by a run that never failed."""
    never = run(tmp_path / "never", (2, 2), [], "shuffles", strategy=strategy)
    faults = [{"rank": 1, "step": 5, "phase": "reduce"}]
    outcome = run(tmp_path, (2, 2), faults, "shuffles", strategy=strategy)
    assert {event["origin"] for event in named(outcome, "adopted_step")} == {1}
    assert not named(outcome, "not_exact")
    for rank in (0, 2, 3):
        assert outcome["digests"][f"bits-{rank}.json"] == never["digests"][f"bits-{rank}.json"]


@pytest.mark.matrix
@pytest.mark.parametrize(("shape", "lost"), [((2, 2), 0), ((2, 3), 5), ((4, 2), 2)])
def test_tied_weights(shape: tuple[int, int], lost: int, tmp_path: Path) -> None:
    fault = {"rank": lost, "step": 5, "phase": "backward", "microbatch": 2}
    outcome = run(tmp_path, shape, [fault], "ties", strategy="adaptive")
    check_bits(outcome, shape, {lost}, "ties")


@pytest.mark.matrix
@pytest.mark.parametrize(("lost", "phase"), [(3, "backward"), (0, "reduce")])
def test_all_stages_skip_a_step_in_which_one_finds_inf(lost: int, phase: str, tmp_path: Path) -> None:
    """With all ranks, and with one missing."""
    habit, fault = "scaled:0:3:1e38", {"rank": lost, "step": 3, "phase": phase, "microbatch": 1}
    check_one_step_at_most(lose_several((2, 2), [fault], tmp_path, "adaptive", habit))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("shape", "habit", "rank", "step"),
    [
        ((2, 2), "ramps", 1, 7),
        ((2, 2), "asks", 2, 0),
        ((2, 3), "ramps", 0, 7),
    ],
)
def test_a_loss_while_shapes_are_learnt(
    shape: tuple[int, int], habit: str, rank: int, step: int, tmp_path: Path
) -> None:
    """One pipeline knows them then, and the other one does not. In step 0 nobody has tried the trainer out yet."""
    faults = [{"rank": rank, "step": step, "phase": "shapes"}]
    outcome = run(tmp_path, shape, faults, habit, strategy="adaptive")
    assert [event["rank"] for event in named(outcome, "left_vacant")] == [rank]
    check_bits(outcome, shape, {rank}, habit, exact=step > 0)


@pytest.mark.matrix
def test_a_loss_is_given_the_numbers_of_its_own_batch(tmp_path: Path) -> None:
    fault = {"rank": 2, "step": 5, "phase": "idle"}
    outcome = run(tmp_path, (2, 2), [fault], "weighs", strategy="adaptive")
    check_bits(outcome, (2, 2), {2}, "weighs")
