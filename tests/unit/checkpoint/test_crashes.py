"""A save is killed before each of its operations on files: one version or the other is there whole, and never a mix."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.crashing import MODES, SABOTAGES, SCENARIOS

TIMEOUT_S = 300


def cases(directory: Path, *sabotage: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.checkpoint.crashing", str(directory), *sabotage],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def amiss(case: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    wrong: list[str] = []
    durable, again = "durable 2" in case["told"], case["scenario"] == "again"
    first, second = case["found"]["1"], case["found"]["2"]
    new, old = ("22", "2") if again else ("2", "refused")
    if first != "1":
        wrong.append(f"the version before is lost: {first}")
    if second != new and (durable or not second.startswith(old)):
        wrong.append(f"{'told as durable' if durable else 'saved'}, and then {second}")
    if second.startswith("refused") and not second.startswith("refused: checkpoint /"):
        wrong.append(f"no reason: {second}")
    if case["again"] != {"2": "20", "3": "30"}:
        wrong.append(f"saved again, and then {case['again']}")
    if [path.split("/")[0] for path in case["left"]] != ["v00000002"] * 2 + ["v00000003"] * 2:
        wrong.append(f"left behind: {case['left']}")
    if case["ended"] != (-9 if case["at"] >= 0 else 0):
        wrong.append(f"it was not killed, but ended with {case['ended']}")
    return wrong


def test_whatever_a_crash_leaves_a_whole_version_is_found_and_saving_goes_on(tmp_path: Path) -> None:
    all_cases = cases(tmp_path)
    assert [(case, wrong) for case in all_cases if (wrong := amiss(case))] == []
    tried = Counter((case["scenario"], case["mode"]) for case in all_cases if case["at"] >= 0)
    assert {*tried} == {(scenario, mode) for scenario in SCENARIOS for mode in MODES}
    # In a save alone: two folders, two files, four writes, a name, and six that make this last.
    assert all(count >= 15 for (_, mode), count in tried.items() if mode != "torn")
    assert all(count == 4 for (_, mode), count in tried.items() if mode == "torn")


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_save_that_lacks_a_part_is_found_out(sabotage: str, tmp_path: Path) -> None:
    assert any(amiss(case) for case in cases(tmp_path, sabotage))
