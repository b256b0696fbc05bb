"""What `swift-ft bench log` makes of its measurements; one small round of the real thing."""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.bench import log
from swift_ft.lab.bench.command import run


def a_round(disk: float, append: float, together: float, read: float = 900.0) -> dict[str, Any]:
    case = {"client_cpu": 0.5, "server_cpu": 0.7, "slowest_over_fastest": 0.9}
    cases = {}
    for name in log.SIZES:
        cases[f"append {name}"] = {"rate": append, **case}
        cases[f"read {name}"] = {"rate": read, **case}
    cases[f"append {log.SHARED_SIZE}, {log.WRITERS} writers"] = {"rate": together, **case}
    limits = {
        "memcpy": 9000.0,
        log.WIRE: 4000.0,
        log.RING: 4000.0,
        log.DISK_WRITE: disk,
        log.DISK_READ: 1000.0,
    }
    return {"limits": limits, "cases": cases}


def test_ratios_are_taken_within_a_round() -> None:
    # The machine was twice as fast in the second one: the ratio is the same.
    result = log.evaluate([a_round(1000, 700, 770), a_round(2000, 1400, 1540)], 512 << 20)
    case = result["cases"]["append 4 MiB"]
    assert case["of_disk"] == pytest.approx(0.7)
    assert case["rate"] == pytest.approx(1050)
    assert result["goals"]["append"] == {"at_least": 0.65, "value": pytest.approx(0.7), "met": True}
    assert result["goals"]["writers"]["value"] == pytest.approx(1.1)
    assert result["goals"]["read"]["met"] is True
    assert result["goals"]["client_cpu"] == {"at_most": 0.45, "value": 0.5, "met": False}
    assert "goal at most 0.6: 0.70, missed (CPU s/GB of the server" in "\n".join(
        log.text({"machine": "", **result})
    )


def test_a_goal_that_is_missed_is_said() -> None:
    result = {"machine": "a machine", **log.evaluate([a_round(1000, 600, 500, read=800)], 512 << 20)}
    assert not any(goal["met"] for goal in result["goals"].values())
    said = "\n".join(log.text(result))
    assert "goal at least 0.65: 0.60, missed" in said
    # The ring, too: four ninths of memcpy's; processor time on both sides.
    assert said.count("missed") == 6


@pytest.mark.parametrize(
    "words", [["--mebibytes", "100"], ["--rounds", "0"], ["--json", "/nowhere/here.json"]]
)
def test_bad_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        run("log", words)


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
