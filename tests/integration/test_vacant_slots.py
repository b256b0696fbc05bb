"""A job of replicas goes on without one of them: its slot is left vacant (trainers/vacant.py)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift.drill.cluster import Cluster
from swift.names import ENV_LEAVE_VACANT
from tests.integration.trainer_world import TRAINERS, run_trainer

STEPS, RANKS, LOST = 14, 3, 1


class LeavingVacant(Cluster):
    """With a spare that is not wanted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, settings={ENV_LEAVE_VACANT: "1"})


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "fault",
    [
        {"rank": LOST, "step": 6, "phase": "reduce"},
        pytest.param({"rank": LOST, "step": 6, "phase": "optimizer"}, marks=pytest.mark.matrix),
    ],
)
def test_the_others_go_on_with_the_mean_over_those_that_are_left(
    fault: dict[str, Any], tmp_path: Path
) -> None:
    run = run_trainer(
        tmp_path / "job",
        "vacant.py",
        "session",
        STEPS,
        ranks=RANKS,
        faults=[{"id": "f0", **fault}],
        make=LeavingVacant,
    )
    trace, left = run["events"], [rank for rank in range(RANKS) if rank != LOST]
    assert [e["event"] for e in trace].count("fault") == 1

    (vacant,) = [e for e in trace if e["event"] == "left_vacant"]
    assert vacant["rank"] == LOST
    assert len([e for e in trace if e["event"] == "spare_assigned"]) == RANKS, "nobody takes its place"
    (plan,) = [e for e in trace if e["event"] == "plan"]
    assert [entry["rank"] for entry in plan["ranks"]] == left
    (named,) = [e for e in trace if e["event"] == "not_exact"]
    assert named["since"] == plan["target_version"]
    assert "the slot of rank 1 is vacant, and nobody computes its batches" in named["reason"]
    assert "the slot of rank 1 is vacant" in run["output"]

    for rank in left:
        pids = {e["pid"] for e in trace if e["event"] == "step_end" and e["rank"] == rank}
        assert len(pids) == 1, "survivors keep their processes"
    digests = [run["digests"][f"rank{rank}-v{STEPS}.json"] for rank in left]
    assert digests[0]["parameters"] == digests[1]["parameters"]

    complete = [e["version"] for e in trace if e["event"] == "checkpoint_complete"]
    assert {plan["target_version"], 8, 12, STEPS} <= set(complete)
    states = [e["state"] for e in trace if e["event"] == "state"]
    assert states[-1] == "FINISHED"

    out = tmp_path / "reference.json"
    arguments = ["reference", STEPS, plan["target_version"], out]
    subprocess.run([sys.executable, TRAINERS / "vacant.py", *map(str, arguments)], check=True, timeout=120)
    wanted = json.loads(out.read_text())
    for rank in left:
        assert run["digests"][f"bits-{rank}.json"] == wanted
