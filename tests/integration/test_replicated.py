"""Data parallelism without a pipeline survives a loss bit for bit, without replaying: trainers/replicated.py."""

from pathlib import Path

import pytest

from tests.integration.forked import Forks
from tests.integration.trainer_world import check_same, run_trainer, undisturbed

pytestmark = pytest.mark.timeout(240)

STEPS = 8


def test_who_is_whole_and_who_takes_its_step_back_give_the_state_together(
    forks: Forks, tmp_path: Path
) -> None:
    """In the first step: what an optimizer makes in it is gone again, or the two would not be alike."""
    twin = undisturbed(forks, tmp_path / "twin", "replicated.py", "wait_free", STEPS, ranks=3)
    faulted = run_trainer(
        tmp_path / "faulted", "replicated.py", "halves", STEPS, ranks=3, faults=[], spares=1
    )
    (plan,) = [e for e in faulted["events"] if e["event"] == "plan"]
    ways = {entry["rank"]: entry["strategy"] for entry in plan["ranks"]}
    assert ways == {0: "KEEP", 1: "REPLICA", 2: "UNDO"}
    assert plan["ranks"][1]["sources"] == [0, 2]
    (undone,) = [e for e in faulted["events"] if e["event"] == "undone"]
    assert undone["buckets"] == 1
    assert len([name for name in faulted["digests"] if "-g" in name]) == 3
    check_same(faulted, twin)


def test_what_is_each_replicas_own_is_not_copied_to_another(tmp_path: Path) -> None:
    """Its last loss, say, which it notes in an attribute: of no consequence, and no reason to refuse the job."""
    fault = {"rank": 1, "step": 4, "phase": "reduce"}
    run = run_trainer(tmp_path, "replicated.py", "notes", STEPS, ranks=2, faults=[fault])
    named = [e["names"] for e in run["events"] if e["event"] == "attributes_apart"]
    assert named
    assert all(names == ["0.0.last_loss"] for names in named)
    (plan,) = (e["ranks"] for e in run["events"] if e["event"] == "plan")
    assert {entry["rank"]: entry["strategy"] for entry in plan}[1] == "REPLICA"
    assert not any(e["event"] == "not_exact" for e in run["events"])
