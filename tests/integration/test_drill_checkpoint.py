"""Drills of the strategy "checkpoint": all ranks go back to the newest complete one, in both modes of saving."""

from pathlib import Path
from typing import Any

import pytest

from swift_ft.state import MODES
from tests.integration.drill_world import (
    CHECKPOINT_EVERY,
    KILL_STEP,
    STEPS,
    Twins,
    drill,
    kills,
    passed,
    shape,
)
from tests.integration.drill_world import spec as spec_at

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
SHAPES = ((1, 2), (1, 4), (2, 1), (2, 2), (4, 2))
"""Stages and replicas."""
PHASES = ("forward", "backward", "reduce", "update", "optimizer", "idle", "save")
SAVED_BEHIND = 2 * CHECKPOINT_EVERY - 1
FEW = {(2, 1, "async", "save"), (2, 2, "sync", "save")}


def words(stages: int, replicas: int, mode: str, *others: str) -> list[str]:
    return [*shape(stages, replicas), "--strategy", "checkpoint", "--checkpoint-mode", mode, *others]


def spec(rank: int, phase: str, step: int = KILL_STEP) -> str:
    return spec_at(rank, phase, SAVED_BEHIND if phase == "save" else step)


def restored(at: Path, twins: Twins, asked: list[str], *specs: str) -> dict[str, Any]:
    """Exactly, and nothing else was done. (Each plan led to the newest version that was complete and not refused: that
    is a check of the drill's own.)"""
    report = passed(drill(*asked, *kills(*specs), "--directory", str(at / "drill"), twins=twins, at=at))
    assert report["exact"] is True
    assert set(report["strategy"].values()) == {"checkpoint"}
    assert report["recoveries"], "nothing was restored"
    assert report["checkpoint"]["mode"] == asked[asked.index("--checkpoint-mode") + 1]
    return report


@pytest.mark.parametrize(
    ("stages", "replicas", "mode", "phase"),
    [
        pytest.param(*size, mode, phase, marks=() if (*size, mode, phase) in FEW else MATRIX)
        for size in SHAPES
        for mode in MODES
        for phase in PHASES
        if size[1] > 1 or phase not in ("reduce", "update")
    ],
)
def test_all_go_back_and_end_with_every_bit(
    stages: int, replicas: int, mode: str, phase: str, twins: Twins, tmp_path: Path
) -> None:
    others = ["--updates", "wait_free"] if phase == "update" else []
    asked = words(stages, replicas, mode, *others)
    rank = stages * replicas - 1
    restored(tmp_path, twins, asked, spec(rank, phase))


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
def test_two_are_lost_one_after_the_other(mode: str, twins: Twins, tmp_path: Path) -> None:
    """The second one in the save of what the first one had lost."""
    specs = [spec(0, "backward"), spec(1, "save")]
    report = restored(tmp_path, twins, words(1, 2, mode), *specs)
    assert len(report["recoveries"]) == 2


@MATRIX
@pytest.mark.parametrize("mode", MODES)
def test_one_is_lost_in_the_last_save(mode: str, twins: Twins, tmp_path: Path) -> None:
    restored(tmp_path, twins, words(2, 1, mode), f"rank=1,step={STEPS - 1},phase=save")


@pytest.mark.parametrize(
    ("stages", "replicas", "mode"),
    [(2, 1, "sync"), pytest.param(1, 2, "async", marks=MATRIX), pytest.param(2, 2, "async", marks=MATRIX)],
)
def test_a_damaged_one_leads_to_the_one_before(
    stages: int, replicas: int, mode: str, twins: Twins, tmp_path: Path
) -> None:
    step = 2 * CHECKPOINT_EVERY + 1
    specs = [spec(0, "backward", step), f"corrupt=checkpoint,rank=1,step={step}"]
    report = restored(tmp_path, twins, words(stages, replicas, mode), *specs)
    assert report["recoveries"][0]["target_version"] == CHECKPOINT_EVERY
    assert report["corruption"]["version"] == 2 * CHECKPOINT_EVERY
    assert "is not what its checksum says" in report["reason"]
