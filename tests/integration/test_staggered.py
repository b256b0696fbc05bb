"""Steps that go on without their vote (trainers/shrinking_pipeline.py): real processes, real SIGKILL.
What the bits must be is computed by plain torch in one process, which clips and steps as torch does."""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.train.staggering import CALM_STEPS
from tests.integration.test_shrink import named, pids
from tests.integration.test_shrink_pipelines import check_bits, check_one_step_at_most, run
from tests.integration.trainer_world import Run

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
STEPS = 24
SHAPE = 2, 2
LATE = CALM_STEPS + 5
"""A step that goes on without its vote, as the one before and the one behind it."""


def fault(rank: int, phase: str, step: int = LATE) -> dict[str, Any]:
    return {"rank": rank, "step": step, "phase": phase, "microbatch": 1}


def staggered(
    directory: Path,
    habit: str,
    faults: list[dict[str, Any]] | None = None,
    shape: tuple[int, int] = SHAPE,
    max_restarts: int = 0,
) -> Run:
    faults = faults or []
    outcome = run(
        directory,
        shape,
        faults,
        habit,
        max_restarts,
        strategy="adaptive",
        steps=STEPS,
        flags=("--staggered", "on"),
    )
    steps = STEPS - 4 if habit == "stops" else STEPS
    lost = {fault["rank"] for fault in faults}
    assert {event["rank"] for event in named(outcome, "left_vacant")} == lost
    check_bits(outcome, shape, set() if max_restarts else lost, habit, steps=steps)
    for rank in set(range(shape[0] * shape[1])) - lost:
        assert len(pids(outcome, rank)) == 1, "survivors keep their processes"
    check_one_step_at_most(outcome)
    return outcome


def settled(outcome: Run) -> set[int]:
    """Steps that have gone on without their vote."""
    return {event["step"] for event in named(outcome, "settled")}


@pytest.mark.parametrize("habit", ["calm", pytest.param("reads", marks=MATRIX)])
def test_nothing_fails(habit: str, tmp_path: Path) -> None:
    outcome = staggered(tmp_path, habit)
    assert settled(outcome) == set(range(CALM_STEPS, STEPS - 1)), "all that need not wait"
    assert not named(outcome, "undone")


@pytest.mark.matrix
def test_a_version_that_is_saved_is_one_that_all_have(tmp_path: Path) -> None:
    outcome = staggered(tmp_path, "saves", [fault(1, "reduce")])
    saved = {event["version"] for event in named(outcome, "checkpoint_complete")}
    assert saved >= {0, 4, 8, 12, 16, 20, 24}
    late = {step for step in settled(outcome) if CALM_STEPS <= step < LATE - 1}
    assert late == {step for step in range(CALM_STEPS, LATE - 1) if (step + 1) % 4}, "steps to them wait"


@pytest.mark.matrix
@pytest.mark.parametrize("lost", [[], [fault(2, "backward")]])
def test_lines_are_written_once(lost: list[dict[str, Any]], tmp_path: Path) -> None:
    outcome = staggered(tmp_path, "logs", lost)
    assert settled(outcome) >= {LATE - 2}
    for rank in (0, 1, 3):
        file = tmp_path / "job" / "checkpoints" / "drill" / "metrics" / f"rank{rank}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(STEPS))
        assert len({line["norm"] for line in lines}) == STEPS


@MATRIX
def test_a_run_that_is_stopped(tmp_path: Path) -> None:
    staggered(tmp_path, "stops")


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_behind_a_bad_step_is_no_error_of_the_trainer(stage: int, tmp_path: Path) -> None:
    outcome = staggered(tmp_path, f"checks:{stage}:{LATE}:1e12")
    assert {event["version"] for event in named(outcome, "undone")} == {LATE}


@pytest.mark.parametrize(
    ("shape", "stage", "factor"),
    [
        # The norm is too large; it is inf, of finite gradients; gradients are nan.
        (SHAPE, 0, "1e30"),
        *(pytest.param(SHAPE, stage, "1e12", marks=MATRIX) for stage in (0, 1)),
        pytest.param(SHAPE, 1, "1e30", marks=MATRIX),
        *(pytest.param(SHAPE, stage, "nan", marks=MATRIX) for stage in (0, 1)),
        *(pytest.param((4, 2), stage, f, marks=MATRIX) for stage in range(4) for f in ("1e12", "1e30")),
    ],
)
def test_a_norm_that_demands_clipping_takes_the_step_back(
    shape: tuple[int, int], stage: int, factor: str, tmp_path: Path
) -> None:
    outcome = staggered(tmp_path, f"calm:{stage}:{LATE}:{factor}", shape=shape)
    assert {event["version"] for event in named(outcome, "undone")} == {LATE}
    assert len(named(outcome, "undone")) == shape[0] * shape[1], "on all ranks"


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_in_which_a_stage_finds_inf_is_taken_back_and_skipped_by_all(
    stage: int, tmp_path: Path
) -> None:
    """The loss is scaled, so gradients of stage 0 alone, or of both, are inf."""
    outcome = staggered(tmp_path, f"scaled:{stage}:{LATE}:1e38")
    assert settled(outcome) >= {LATE - 2, LATE - 1}
    assert {event["version"] for event in named(outcome, "undone")} == {LATE}
    assert "inf or nan" in outcome["output"]


@MATRIX
@pytest.mark.parametrize(("rank", "phase"), [(0, "reduce"), (3, "settle"), (2, "forward")])
def test_a_rank_is_lost_where_a_stage_finds_inf(rank: int, phase: str, tmp_path: Path) -> None:
    staggered(tmp_path, f"scaled:0:{LATE}:1e38", [fault(rank, phase)])


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        (3, "forward"),
        *(
            pytest.param(rank, phase, marks=MATRIX)
            for rank in range(4)
            for phase in ("forward", "backward", "reduce", "optimizer", "idle", "settle")
            if (rank, phase) != (3, "forward")
        ),
    ],
)
def test_a_rank_is_lost(rank: int, phase: str, tmp_path: Path) -> None:
    outcome = staggered(tmp_path, "calm", [fault(rank, phase)])
    assert settled(outcome) >= {LATE - 2, LATE + 3}, "also while a rank is missing"


@MATRIX
@pytest.mark.parametrize(("shape", "rank", "phase"), [((2, 2), 3, "reduce"), ((2, 3), 1, "settle")])
def test_one_comes_back(shape: tuple[int, int], rank: int, phase: str, tmp_path: Path) -> None:
    outcome = staggered(tmp_path, "returns", [fault(rank, phase)], shape, max_restarts=1)
    assert len(pids(outcome, rank)) == 2


@MATRIX
@pytest.mark.parametrize(
    ("shape", "faults"),
    [
        ((2, 3), [fault(1, "backward"), fault(5, "reduce", LATE + 3)]),
        ((4, 2), [fault(7, "optimizer"), fault(0, "forward", LATE + 4)]),
        ((4, 3), [fault(4, "reduce"), fault(5, "backward", LATE + 3), fault(9, "idle", LATE + 6)]),
        ((2, 2), [fault(0, "backward"), fault(3, "backward")]),
    ],
)
def test_several_losses(shape: tuple[int, int], faults: list[dict[str, Any]], tmp_path: Path) -> None:
    staggered(tmp_path, "calm", faults, shape)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("rank", "phase", "step"),
    [
        (2, "reduce", LATE + 1),
        (2, "settle", LATE),  # whoever comes to it later is interrupted before
        (0, "take_back", LATE),
        (3, "take_back", LATE),
        (1, "reduce", LATE),
        (3, "optimizer", LATE),
        (0, "forward", LATE + 1),
        (1, "backward", LATE + 1),
        (3, "idle", LATE + 1),
    ],
)
def test_a_rank_is_lost_while_a_step_should_be_taken_back(
    rank: int, phase: str, step: int, tmp_path: Path
) -> None:
    staggered(tmp_path, f"calm:1:{LATE}:1e12", [fault(rank, phase, step)])
