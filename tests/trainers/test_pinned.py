"""Runs in which a sweep has found something, again: `pinned.txt`."""

from pathlib import Path

import pytest

from tests.trainers.harness import header
from tests.trainers.harness.sweep import Plan, Sweep

LINES = (Path(__file__).parent / "pinned.txt").read_text().splitlines()
PINNED = [line for line in LINES if line and not line.startswith("#")]


def test_each_names_a_trainer_and_says_all_of_its_plan() -> None:
    worlds = {trainer.name: trainer.worlds for trainer in header.trainers()}
    assert PINNED
    for line in PINNED:
        plan = Plan.parse(line)
        assert str(plan) == line
        assert plan.world in worlds[plan.trainer]


@pytest.mark.matrix
@pytest.mark.timeout(700)
@pytest.mark.parametrize("line", PINNED, ids=[str(Plan.parse(line).trainer) for line in PINNED])
def test_a_run_that_was_missed_once(line: str, tmp_path: Path) -> None:
    (done,) = Sweep(tmp_path, lanes=1).run(iter([(0, Plan.parse(line))]))
    assert done.good, f"{done.word}: {done.why}"
