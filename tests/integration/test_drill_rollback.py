"""Drills of the strategy "rollback": the interrupted step is taken back by all that are left, and done again."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.drill_world import PHASES, STEPS, Twins, calculated, drill, kills, passed, shape, spec

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
STEP, LOST = 6, 1
DROP = ["--lost-shard", "drop", "--allow-inexact"]


def rollback(replicas: int, *words: str) -> list[str]:
    return [*shape(1, replicas), "--strategy", "rollback", *words]


def never_finished(report: dict[str, Any]) -> None:
    for recovery in report["recoveries"]:
        used = {entry["strategy"] for entry in recovery["ranks"].values()}
        assert used <= {"keep", "undo", "replica"}, used


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=MATRIX)])
@pytest.mark.parametrize(
    "phase", ["reduce", *(pytest.param(p, marks=MATRIX) for p in PHASES if p != "reduce")]
)
def test_it_is_done_again_with_the_lost_batches(
    replicas: int, phase: str, twins: Twins, tmp_path: Path
) -> None:
    report = passed(drill(*rollback(replicas), *kills(spec(LOST, phase, STEP)), twins=twins, at=tmp_path))
    assert report["exact"] is True
    never_finished(report)
    (share,) = report["shrink"]["batches_computed_for"]
    target = report["recoveries"][0]["target_version"]
    assert (share["rank"], share["steps"]) == (LOST, STEPS - target)


@pytest.mark.parametrize(
    ("replicas", "phase"),
    [
        (4, "update"),
        *(
            pytest.param(replicas, phase, marks=MATRIX)
            for replicas in (2, 4)
            for phase in (*PHASES, "update")
            if (replicas, phase) != (4, "update")
        ),
    ],
)
def test_what_is_applied_is_taken_back(replicas: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    words = [*rollback(replicas, *DROP, "--updates", "wait_free"), *kills(spec(LOST, phase, STEP))]
    report = calculated(drill(*words, twins=twins, at=tmp_path))
    never_finished(report)
    if phase in ("update", "reduce", "optimizer"):
        assert report["recoveries"][0]["target_version"] == STEP


@MATRIX
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("stages", [2, 4])
def test_pipelines_do_it_again(stages: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    words = [*shape(stages, 2), "--strategy", "rollback", *kills(spec(LOST, phase, STEP))]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    assert report["exact"] is True
    never_finished(report)


@MATRIX
def test_two_are_lost_and_both_come_back(twins: Twins, tmp_path: Path) -> None:
    specs = [spec(2, "backward", 4), spec(0, "reduce", 7)]
    report = passed(drill(*rollback(4, "--grow", "step=9"), *kills(*specs), twins=twins, at=tmp_path))
    never_finished(report)
    assert report["shrink"]["returned"] == {"0": 10, "2": 10}
