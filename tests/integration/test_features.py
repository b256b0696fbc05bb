"""What a trainer may do in a step survives a recovery bit for bit: see trainers/features.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.forked import Forks
from tests.integration.trainer_world import run_trainer, undisturbed

STEPS = 8


@pytest.mark.timeout(240)
def test_features(forks: Forks, tmp_path: Path) -> None:
    fault: dict[str, Any] = {"rank": 1, "step": 4, "microbatch": 1, "phase": "backward"}
    twin = undisturbed(forks, tmp_path / "twin", "features.py", "traced", STEPS, ranks=3)
    faulted = run_trainer(tmp_path / "faulted", "features.py", "traced", STEPS, ranks=3, faults=[fault])
    assert [e["event"] for e in faulted["events"]].count("fault") == 1
    plan, replay = (
        next(e for e in faulted["events"] if e["event"] == name) for name in ("plan", "replay_end")
    )
    # A replay saves again what its rank had not: so it may be complete by its end.
    saved = [e for e in faulted["events"] if e["event"] == "checkpoint_complete" and e["t"] < plan["t"]]
    assert replay["steps"] == fault["step"] - max(e["version"] for e in saved)
    assert replay["verified"] > 0
    for name, digests in twin["digests"].items():
        assert faulted["digests"][name] == digests, name
    recovered = [name for name in faulted["digests"] if "-g" in name]
    assert len(recovered) == 3
    for name in recovered:
        assert faulted["digests"][name] == twin["digests"][name.split("-g")[0] + ".json"]
