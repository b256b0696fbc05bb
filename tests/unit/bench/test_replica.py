"""The benchmark of the replica copy: what it makes of its measurements, and one small run of all of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.bench import replica
from swift_ft.lab.bench.command import main


def measured(raw: list[float], copy: list[float]) -> dict[str, Any]:
    seconds = {replica.RAW: raw, replica.RAW_NEW: raw, **dict.fromkeys(replica.COPIES, copy)}
    return {"bytes": 1 << 30, "seconds": seconds}


def test_ratios_are_those_of_a_round() -> None:
    # The machine slows down while it goes on: medians of the two would give 0.5.
    result = replica.evaluate(measured([0.2, 0.2, 0.6], [0.25, 0.4, 0.75]), {"missing": "-"}, "here")
    by_name = {case["case"]: case for case in result["cases"]}
    assert by_name[replica.RAW]["ratio"] is None
    assert by_name["1 source"]["ratio"] == 0.8
    assert by_name["1 source"]["bytes_per_second"] == round((1 << 30) / 0.4)
    assert [goal["met"] for goal in result["goals"]] == [True] * len(replica.COPIES)


@pytest.mark.parametrize(("seconds", "met"), [(1.0, True), (1.01, False)])
def test_the_goal_is_at_least_seven_tenths(seconds: float, met: bool) -> None:
    result = replica.evaluate(measured([0.7], [seconds]), {"missing": "-"}, "here")
    assert {goal["met"] for goal in result["goals"]} == {met}
    assert ("NOT MET" in replica.table(result)) is not met


REPORT = {
    "verdict": "PASS",
    "strategy": {"0": "replica"},
    "recovery_seconds": {"detect": 0.1, "total": 0.3},
    "rerun": "swift-ft drill",
}


def test_the_drill_gives_the_time_to_the_next_step() -> None:
    found = replica.from_report(REPORT)
    assert found["kill_to_next_step_seconds"] == 0.3
    result = replica.evaluate(measured([1.0], [1.0]), found, "here")
    assert "time from kill to next step: 300 ms (replica, PASS" in replica.table(result)


@pytest.mark.parametrize(
    "change",
    [{"verdict": "FAIL"}, {"recovery_seconds": None}, {"strategy": {"0": "replay"}}, {"strategy": None}],
)
def test_a_drill_that_shows_something_else_gives_no_time(change: dict[str, Any]) -> None:
    found = replica.from_report({**REPORT, **change})
    assert found.keys() == {"missing"}
    assert "\n" not in found["missing"]


def test_a_drill_that_refuses_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "DRILL", "drill --fly")
    found = replica.run_drill()
    assert found["missing"].startswith("the drill did not run: ")
    assert "--fly" in found["missing"]
    assert "\n" not in found["missing"]


@pytest.mark.parametrize(
    "arguments", [["--mebibytes", "0"], ["--rounds", "0"], ["--json", "/nowhere/at/all"]]
)
def test_bad_input(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        replica.main(arguments)


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "replica.json"
    assert main(["replica", "--mebibytes", "1", "--rounds", "2", "--no-drill", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [len(case["seconds"]) for case in result["cases"]] == [2] * (2 + len(replica.COPIES))
    assert result["bytes"] >= 1 << 20
    assert result["drill"] == {"missing": "left out (--no-drill)"}
    assert "cores" in result["machine"]
    assert "raw socket" in capsys.readouterr().out
