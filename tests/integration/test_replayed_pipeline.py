"""Stages of trainers with habits (trainers/shrinking_pipeline.py) are replayed. What the bits must be is computed by
plain torch in one process. `test_adaptive` has the same habits with ranks missing.
"""

from pathlib import Path

import pytest

from tests.integration.test_shrink_pipelines import TRAINER, check_bits
from tests.integration.trainer_world import run_trainer

pytestmark = pytest.mark.timeout(240)

STEPS = 12
MATRIX = pytest.mark.matrix


@pytest.mark.parametrize(
    ("habit", "rank"),
    [
        ("alternates", 1),
        pytest.param("scaled:1:3:1e38", 2, marks=MATRIX),
        *(pytest.param("alternates", rank, marks=MATRIX) for rank in (0, 2)),
        *(pytest.param("ramps", rank, marks=MATRIX) for rank in (0, 1, 2)),
        *(pytest.param("scaled:0:3:1e38", rank, marks=MATRIX) for rank in (0, 1)),
    ],
)
def test_a_stage_is_replayed(habit: str, rank: int, tmp_path: Path) -> None:
    """Of two schedules, steps of both; with a gradient scaler, also a step that was skipped."""
    fault = {"rank": rank, "step": 9, "phase": "backward", "microbatch": 2}
    words = ("session", STEPS, 3, 1, habit)
    outcome = run_trainer(tmp_path / "job", TRAINER, *words, ranks=3, faults=[fault])
    assert [event["rank"] for event in outcome["events"] if event["event"] == "replay_end"] == [rank]
    check_bits(outcome, (3, 1), set(), habit)


@MATRIX
def test_wait_free_updates_divide_by_the_microbatches_of_the_schedule_that_runs(tmp_path: Path) -> None:
    words = ("session", STEPS, 2, 2, "applies")
    outcome = run_trainer(tmp_path / "job", TRAINER, *words, ranks=4, faults=[])
    check_bits(outcome, (2, 2), set(), "applies")


def test_a_stage_without_gradients_has_the_scale_of_the_others(tmp_path: Path) -> None:
    fault = {"rank": 1, "step": 9, "phase": "backward", "microbatch": 2}
    words = ("session", STEPS, 3, 1, "freezes")
    outcome = run_trainer(tmp_path / "job", TRAINER, *words, ranks=3, faults=[fault])
    first, *others = (outcome["digests"][f"bits-{rank}.json"] for rank in range(3))
    assert len(set(first.values())) > 1, "it grows"
    for other in others:
        assert other.items() <= first.items()
