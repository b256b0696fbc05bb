"""A rank is lost while all ranks go back to a checkpoint: all go back again, and end with every bit."""

from pathlib import Path

import pytest

from tests.integration.again_world import Again

EVERY, LOST = 2, 5
NEWEST = 4
STEPS = LOST + 2


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("rank", "at"),
    [
        pytest.param(0, "load", id="a survivor"),
        pytest.param(1, "loaded", id="the replacement", marks=pytest.mark.matrix),
    ],
)
def test_all_go_back_again(rank: int, at: str, tmp_path: Path) -> None:
    first = {"rank": 1, "step": LOST, "what": "die when told"}
    second = {"rank": rank, "at": at, "what": "kill", "behind": 0}
    with Again(tmp_path / "lost") as job:
        (job.directory / f"die{LOST}").touch()  # as soon as there is a checkpoint
        flags = ["--strategy", "checkpoint", "--max-restarts", "10"]
        assert job.unlucky(STEPS, first, second, every=EVERY, flags=flags) == 0, job.said
        plans = job.events("plan")
        assert [plan["target_version"] for plan in plans] == [NEWEST, NEWEST]
        assert {entry["strategy"] for plan in plans for entry in plan["ranks"]} == {"CHECKPOINT"}
        died = [event["rank"] for event in job.events("child_exit") if event["code"] == -9]
        assert died == [1, rank]
        digests = job.digests(STEPS)
    with Again(tmp_path / "whole") as job:
        assert job.unlucky(STEPS, every=EVERY) == 0, job.said
        assert job.digests(STEPS) == digests
