"""The benchmark of the coordinator: what it runs, counts and says."""

import json
from pathlib import Path

import pytest

from swift_ft.lab.bench import coordinator
from swift_ft.lab.bench.command import main


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", "--members", "8,16", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [case["members"] for case in found["cases"]] == [8, 16]
    for case in found["cases"]:
        assert case["generation"] == 2
        assert case["join_cpu_s"] > 0
        assert case["recovery_s"] > 0
        # Every member has seen every state of the recovery, or the last one at least.
        assert case["view_bytes"] > case["members"] * 20
    assert "recovery cpu s" in capsys.readouterr().out


def test_goals_are_judged() -> None:
    cases = [{"members": 256, "recovery_cpu_s": 0.25}, {"members": 1024, "recovery_cpu_s": 1.75}]
    assert coordinator.verdicts(cases) == [
        "goal at most 1 s: 1.75 s, missed (recovery of 1024 members)",
        "goal at most 6-fold: 7.00-fold, missed (256 to 1024 members)",
    ]
    cases[1]["recovery_cpu_s"] = 0.75
    assert all(": " in line and "met" in line for line in coordinator.verdicts(cases))
