"""A trainer that calls two schedules of different numbers of microbatches (trainers/shrinking_pipeline.py). What the
bits must be is computed by plain torch in one process. `test_adaptive` has it with a rank missing.
"""

from pathlib import Path

import pytest

from tests.integration.test_shrink_pipelines import TRAINER, check_bits
from tests.integration.trainer_world import run_trainer

STEPS = 12
MATRIX = pytest.mark.matrix


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("habit", "rank"),
    [
        ("alternates", 1),
        *(
            pytest.param(habit, rank, marks=MATRIX)
            for habit, rank in (
                ("alternates", 0),
                ("alternates", 2),
                ("ramps", 0),
                ("ramps", 1),
                ("ramps", 2),
            )
        ),
    ],
)
def test_a_stage_is_replayed(habit: str, rank: int, tmp_path: Path) -> None:
    """Steps of both are replayed."""
    fault = {"rank": rank, "step": 9, "phase": "backward", "microbatch": 2}
    outcome = run_trainer(tmp_path / "job", TRAINER, "session", STEPS, 3, 1, habit, ranks=3, faults=[fault])
    assert [event["rank"] for event in outcome["events"] if event["event"] == "replay_end"] == [rank]
    check_bits(outcome, (3, 1), set(), tmp_path, habit)


@pytest.mark.timeout(240)
def test_wait_free_updates_divide_by_the_microbatches_of_the_one_that_runs(tmp_path: Path) -> None:
    words = ("session", STEPS, 2, 2, "applies")
    outcome = run_trainer(tmp_path / "job", TRAINER, *words, ranks=4, faults=[])
    check_bits(outcome, (2, 2), set(), tmp_path, "applies")
