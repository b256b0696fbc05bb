"""Drills of the strategy "rollback": the interrupted step is taken back by all that are left, and done again."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.drill_world import STEPS, Twins, drill, kills, passed

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
STEP, LOST = 6, 1
PHASES = ("forward", "backward", "reduce", "optimizer", "idle")
DROP = ["--lost-shard", "drop", "--allow-inexact"]


def rollback(replicas: int, *words: str) -> list[str]:
    return ["--stages", "1", "--replicas", str(replicas), "--strategy", "rollback", *words]


def spec(phase: str, rank: int = LOST, step: int = STEP) -> str:
    where = ",microbatch=1" if phase in ("forward", "backward") else ""
    return f"rank={rank},step={step}{where},phase={phase}"


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
    report = passed(drill(*rollback(replicas), *kills(spec(phase)), twins=twins, at=tmp_path))
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
    words = [*rollback(replicas, *DROP, "--updates", "wait_free"), *kills(spec(phase))]
    outcome = drill(*words, twins=twins, at=tmp_path)
    assert outcome.exit_code == 0, outcome.explain()
    report = outcome.report
    assert report is not None
    assert (report["verdict"], report["exact"], report["survivors_kept"]) == ("PASS", False, True)
    assert report["shrink"]["compared_with"] == "an independent calculation"
    never_finished(report)
    if phase in ("update", "reduce", "optimizer"):
        assert report["recoveries"][0]["target_version"] == STEP


@MATRIX
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("stages", [2, 4])
def test_pipelines_do_it_again(stages: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    words = ["--stages", str(stages), "--replicas", "2", "--strategy", "rollback", *kills(spec(phase))]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    assert report["exact"] is True
    never_finished(report)


@MATRIX
def test_two_are_lost_and_both_come_back(twins: Twins, tmp_path: Path) -> None:
    specs = [spec("backward", 2, 4), spec("reduce", 0, 7)]
    report = passed(drill(*rollback(4, "--grow", "step=9"), *kills(*specs), twins=twins, at=tmp_path))
    never_finished(report)
    assert report["shrink"]["returned"] == {"0": 10, "2": 10}
