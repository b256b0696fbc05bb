"""The benchmark of the planner: what it draws, and what it says."""

import json
from pathlib import Path

import pytest

from swift_ft.lab.bench import plan
from swift_ft.lab.bench.command import main


@pytest.mark.parametrize(("sizes", "different"), [(1, 1), (2, 2), (0, 39)])
def test_boundaries_have_as_many_sizes_as_are_asked_for(sizes: int, different: int) -> None:
    drawn = plan.drawn(40, 10, sizes)
    assert (drawn.stages, drawn.machines) == (40, 10)
    assert len(set(drawn.forward_bytes)) == different
    assert drawn.forward_bytes == drawn.backward_bytes


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan, "STAGES", 24)
    assert main(["plan", "--rounds", "1", "--json", str(tmp_path / "plan.json")]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [case["machines"] for case in found["cases"]] == [3, 3, 3, 24, 24, 24]
    assert all(case["seconds"] > 0 and case["points"] > 0 for case in found["cases"])
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith("24 stages; ")
    assert shown.count("of two sizes") == 2


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rounds", "0"]) == 2
    assert "--rounds takes 1 or more" in capsys.readouterr().err
