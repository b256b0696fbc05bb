"""Drills of the strategy "lossy-forward": a step that a loss cuts short is finished with those that are left."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.integration.drill_world import PHASES, STEPS, Outcome, Twins, calculated, drill, kills, shape, spec

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
STEP, LOST = 6, 1


def lossy(replicas: int, *words: str) -> list[str]:
    return [*shape(1, replicas), "--strategy", "lossy-forward", "--allow-inexact", *words]


def finished(outcome: Outcome, *vacant: list[int]) -> dict[str, Any]:
    report = calculated(outcome)
    assert report["bitwise_equal"] is False
    assert report["digests"]["end"]["equal"] is True
    assert report["not_exact"]
    assert report["shrink"]["vacant_after"] == list(vacant)
    for cut in report["lossy"]:
        for bucket in cut["buckets"]:
            assert bucket["divisor"] == len(bucket["contributors"])
    return report


def contributors(report: dict[str, Any], step: int = STEP) -> set[tuple[int, ...]]:
    (buckets,) = [cut["buckets"] for cut in report["lossy"] if cut["step"] == step]
    return {tuple(bucket["contributors"]) for bucket in buckets}


@pytest.mark.parametrize(
    ("replicas", "phase", "updates"),
    [
        (4, "update", "wait_free"),
        *(
            pytest.param(replicas, phase, "after_backward", marks=MATRIX)
            for replicas, phase in itertools.product((2, 4), PHASES)
        ),
        *(
            pytest.param(replicas, phase, "wait_free", marks=MATRIX)
            for replicas, phase in itertools.product((2, 4), (*PHASES, "update"))
            if (replicas, phase) != (4, "update")
        ),
    ],
)
def test_what_is_averaged_stays(
    replicas: int, phase: str, updates: str, twins: Twins, tmp_path: Path
) -> None:
    words = [*lossy(replicas, "--updates", updates), *kills(spec(LOST, phase, STEP))]
    report = finished(drill(*words, twins=twins, at=tmp_path), [LOST])
    everybody = tuple(range(replicas))
    left = tuple(rank for rank in everybody if rank != LOST)
    if phase in ("reduce", "update"):
        assert report["recoveries"][0]["target_version"] == STEP + 1
        assert left in contributors(report) <= {everybody, left}
    if phase == "update":
        assert everybody in contributors(report), "half of the buckets were applied"
    assert report["steps_lost"] == 0


@MATRIX
@pytest.mark.parametrize("updates", ["after_backward", "wait_free"])
def test_two_are_lost_and_both_come_back(updates: str, twins: Twins, tmp_path: Path) -> None:
    specs = [spec(2, "reduce", 4), spec(0, "backward", 7)]
    words = [*lossy(4, "--grow", "step=9", "--updates", updates), *kills(*specs)]
    report = finished(drill(*words, twins=twins, at=tmp_path), [2], [0, 2], [])
    assert report["shrink"]["returned"] == {"0": 10, "2": 10}
    assert report["shrink"]["compared_at_end"] == [0, 1, 2, 3]
    assert STEPS > 10


@pytest.mark.parametrize("updates", ["after_backward", pytest.param("wait_free", marks=MATRIX)])
def test_a_second_loss_while_the_step_is_finished(updates: str, twins: Twins, tmp_path: Path) -> None:
    """Rank 3 is killed when all have agreed on what is averaged, and the rest is not yet."""
    specs = [spec(1, "reduce", STEP), "rank=3,phase=finish"]
    words = [*lossy(4, "--updates", updates), *kills(*specs)]
    report = finished(drill(*words, twins=twins, at=tmp_path), [1, 3])
    assert (0, 2) in contributors(report) <= {(0, 1, 2, 3), (0, 2)}
