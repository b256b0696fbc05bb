"""What a trainer may do in a step survives a recovery bit for bit: see trainers/features.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer_world import Run, run_trainer

STEPS = 8


def run(directory: Path, mode: str, faults: list[dict[str, Any]]) -> Run:
    return run_trainer(directory, "features.py", mode, STEPS, ranks=3, faults=faults)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("traced", {"rank": 1, "step": 4, "microbatch": 1, "phase": "backward"}),
        ("manual", {"rank": 1, "step": 5, "microbatch": 2, "phase": "forward"}),
    ],
)
def test_features(mode: str, fault: dict[str, Any], tmp_path: Path) -> None:
    twin = run(tmp_path / "twin", mode, [])
    faulted = run(tmp_path / "faulted", mode, [{"id": "f0", **fault}])
    assert [e["event"] for e in faulted["events"]].count("fault") == 1
    replay = next(e for e in faulted["events"] if e["event"] == "replay_end")
    saved = [e for e in faulted["events"] if e["event"] == "checkpoint_complete" and e["t"] < replay["t"]]
    assert replay["steps"] == fault["step"] - max(e["version"] for e in saved)
    assert replay["verified"] > 0
    for name, digests in twin["digests"].items():
        assert faulted["digests"][name] == digests, name
    recovered = [name for name in faulted["digests"] if "-g" in name]
    assert len(recovered) == 3
    for name in recovered:
        assert faulted["digests"][name] == twin["digests"][name.split("-g")[0] + ".json"]
