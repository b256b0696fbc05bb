"""The long matrix: every schedule, victim and phase, each kill in a run of its own. ``scripts/test -m matrix``."""

from pathlib import Path

import pytest

from tests.integration.drill_world import Twins, drill, kills, passed

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(300)]

SCHEDULES = ["1f1b", "gpipe", "interleaved1f1b", "interleavedzerobubble", "zbv", "dualpipev"]
MICROBATCHES = {"dualpipev": "8"}


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "idle"])
@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_kill(schedule: str, rank: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    where = ",microbatch=2" if phase in ("forward", "backward") else ""
    report = passed(
        drill(
            "--schedule",
            schedule,
            "--microbatches",
            MICROBATCHES.get(schedule, "4"),
            *kills(f"rank={rank},step=8{where},phase={phase}"),
            twins=twins,
            at=tmp_path,
        )
    )
    assert report["exact"] is True
