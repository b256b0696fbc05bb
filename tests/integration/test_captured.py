"""What each replica notes for itself. See trainers/captured.py."""

from pathlib import Path

import pytest

from tests.integration.trainer_world import Run, run_trainer

STEPS = 7


def copied(run: Run) -> bool:
    """A replica was copied, and nobody went back to a checkpoint."""
    (plan,) = (e for e in run["events"] if e["event"] == "plan")
    return "replica" in str(plan).lower() and any(e["event"] == "replica_received" for e in run["events"])


@pytest.mark.timeout(240)
def test_what_is_each_replicas_own_is_not_copied_to_another(tmp_path: Path) -> None:
    """Its last loss, say, which it notes in an attribute: of no consequence, and no reason to refuse the job."""
    fault = {"rank": 1, "step": 4, "phase": "reduce"}
    run = run_trainer(tmp_path / "run", "captured.py", STEPS, ranks=2, faults=[fault])
    named = [e for e in run["events"] if e["event"] == "attributes_apart"]
    assert named
    assert all(e["names"] == ["0.last_loss"] for e in named)
    assert copied(run)
    assert not any(e["event"] == "not_exact" for e in run["events"])
