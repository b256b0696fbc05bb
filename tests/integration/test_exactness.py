"""What a trainer hides from the session is found by comparing, and then nobody says "exact"."""

from pathlib import Path
from typing import Any

from tests.integration.trainer_world import run_trainer


def plans(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in run["events"] if event["event"] == "plan"]


def said(directory: Path, process: str) -> str:
    return (directory / "output" / f"{process}.txt").read_text()


def test_a_replay_that_differs_makes_the_job_inexact_and_everybody_says_so(tmp_path: Path) -> None:
    """A loader that is not registered: the replacement begins at the first batch again."""
    fault = {"rank": 0, "step": 8, "microbatch": 0, "phase": "forward", "hold": True}
    run = run_trainer(tmp_path, "hidden.py", 12, ranks=2, faults=[fault], saved=5)
    assert [plan["exact"] for plan in plans(run)] == [True, False]
    launcher, coordinator = said(tmp_path, "launcher"), said(tmp_path, "coordinator")
    line = next(line for line in launcher.splitlines() if "restore" in line)
    assert line.startswith(
        "swift: replay refused: rank 0: s0.X step 5 microbatch 0 slot 0: external input 0 of stage 0 in step 5"
    )
    assert line.endswith("restored version 5; not exact")
    assert "not exact since version 5: rank 0: " in launcher.splitlines()[-1]
    assert "WARNING not_exact job=drill" in coordinator
    assert "WARNING refused job=drill" in coordinator
