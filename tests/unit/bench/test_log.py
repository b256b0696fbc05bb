"""What `swift-ft bench log` makes of its measurements; one small round of the real thing."""

import json
from pathlib import Path

import pytest

from swift_ft.lab.bench import log
from swift_ft.lab.bench.command import run
from swift_ft.lab.bench.output import Rounds


def rounds_of(*rounds: tuple[float, float, float, float]) -> Rounds:
    """Each: rates of the disk's writes, an append, several writers, and a read (the disk's reads have 1000)."""
    made = Rounds()
    for disk, append, together, read in rounds:
        made.note(log.DISK_WRITE, disk)
        made.note(log.DISK_READ, 1000.0)
        rates = {f"append {name}": append for name in log.SIZES} | {
            f"read {name}": read for name in log.SIZES
        }
        for case, rate in (rates | {log.TOGETHER: together}).items():
            made.note_all(case, {"rate": rate, "client_cpu": 0.5, "server_cpu": 0.7})
    return made


def test_ratios_are_taken_within_a_round() -> None:
    # The machine was twice as fast in the second one: the ratio is the same.
    result = log.evaluate(rounds_of((1000, 700, 770, 900), (2000, 1400, 1540, 900)), 512 << 20)
    case = result["cases"]["append 4 MiB"]
    assert case["of_disk"] == pytest.approx(0.7)
    assert case["rate"] == pytest.approx(1050)
    assert result["goals"]["append"] == {"at_least": 0.85, "value": pytest.approx(0.7), "met": False}
    assert result["goals"]["small"] == {"at_least": 0.5, "value": pytest.approx(0.7), "met": True}
    assert result["goals"]["writers"]["value"] == pytest.approx(1.1)
    assert result["goals"]["read"]["met"] is True
    assert result["goals"]["cpu"] == {"at_most": 0.4, "value": pytest.approx(1.2), "met": False}
    assert "goal at most 0.4: 1.20, missed (CPU s/GB of an append of 4 MiB" in "\n".join(
        log.text({"machine": "", **result})
    )


def test_a_goal_that_is_missed_is_said() -> None:
    result = {"machine": "a machine", **log.evaluate(rounds_of((1000, 400, 300, 800)), 512 << 20)}
    assert not any(goal["met"] for goal in result["goals"].values())
    said = "\n".join(log.text(result))
    assert "goal at least 0.85: 0.40, missed" in said
    assert said.count("missed") == 5


def test_one_small_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "SIZES", {"64 KiB": 64 << 10, "4 MiB": 4 << 20})
    path = tmp_path / "log.json"
    assert (
        run("log", ["--mebibytes", "256", "--rounds", "1", "--directory", str(tmp_path), "--json", str(path)])
        == 0
    )
    result = json.loads(path.read_text())
    assert set(result["cases"]) == {
        "append 64 KiB",
        "append 4 MiB",
        "append 4 MiB, 4 writers",
        "read 64 KiB",
        "read 4 MiB",
    }
    assert all(case["rate"] > 0 and case["server_cpu"] > 0 for case in result["cases"].values())
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.json"]  # nothing is left
