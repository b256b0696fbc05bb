"""What a trainer keeps is kept for it: after a kill, the bits of a run that never failed. See trainers/captured.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.forked import Forks
from tests.integration.trainer_world import Run, run_trainer, undisturbed

STEPS = 7


def same_digests(twin: Run, run: Run) -> None:
    for name, digests in twin["digests"].items():
        again = [n for n in run["digests"] if n == name or n.startswith(name.removesuffix(".json") + "-g")]
        assert again, name
        assert all(run["digests"][n] == digests for n in again), name
    recovered = [name for name in run["digests"] if "-g" in name]
    assert recovered
    for name in recovered:
        assert run["digests"][name] == twin["digests"][name.split("-g")[0] + ".json"], name


def copied(run: Run) -> bool:
    """A replica was copied, and nobody went back to a checkpoint."""
    (plan,) = (e for e in run["events"] if e["event"] == "plan")
    return "replica" in str(plan).lower() and any(e["event"] == "replica_received" for e in run["events"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        pytest.param("layout", {"rank": 1, "step": 4, "phase": "optimizer"}, marks=pytest.mark.matrix),
        ("attributes", {"rank": 1, "step": 4, "phase": "reduce"}),
        pytest.param("apart", {"rank": 0, "step": 4, "phase": "optimizer"}, marks=pytest.mark.matrix),
    ],
)
def test_replicas(mode: str, fault: dict[str, Any], forks: Forks, tmp_path: Path) -> None:
    twin = undisturbed(forks, tmp_path / "twin", "captured.py", mode, STEPS, ranks=2)
    run = run_trainer(tmp_path / "run", "captured.py", mode, STEPS, ranks=2, faults=[fault])
    assert [e["event"] for e in run["events"]].count("fault") == 1
    assert copied(run)
    same_digests(twin, run)


@pytest.mark.timeout(240)
def test_what_is_each_replicas_own_is_not_copied_to_another(tmp_path: Path) -> None:
    """Its last loss, say, which it notes in an attribute: of no consequence, and no reason to refuse the job."""
    fault = {"rank": 1, "step": 4, "phase": "reduce"}
    run = run_trainer(tmp_path / "run", "captured.py", "apart", STEPS, ranks=2, faults=[fault])
    named = [e for e in run["events"] if e["event"] == "attributes_apart"]
    assert named
    assert all(e["names"] == ["0.last_loss"] for e in named)
    assert copied(run)
    assert not any(e["event"] == "not_exact" for e in run["events"])
