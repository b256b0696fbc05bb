"""`swift-ft study` with real processes and real kills: few cells, stopped and continued, and what it refuses."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RESULT: dict[str, Any] = {"fewer": [], "digests": [], "measured": 0.0, "injected": 0, "batches_dropped": 0}
FEW = ("--task", "bytes", "--strategy", "auto,shrink-drop", "--rates", "2", "--seeds", "1", "--steps", "40")


def study(directory: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "swift_ft.cli", "study", "--out", str(directory), *words]


def children() -> set[str]:
    """Command lines of what a study starts."""
    found = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    return {line for line in found.splitlines() if "swift_ft.lab.study.trainers" in line}


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_study_that_is_stopped_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "study"
    with subprocess.Popen(study(out, *FEW), stderr=subprocess.DEVNULL) as process:
        while len(list(out.glob("cells/*.json"))) < 2:
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    assert not any(str(out) in line for line in children())
    before = {path: path.stat().st_mtime_ns for path in out.glob("cells/*.json")}

    run = subprocess.run(study(out, *FEW), check=False, capture_output=True, text=True, timeout=300)

    assert run.returncode == 0, run.stdout + run.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what was done is not done again"
    found: dict[str, Any] = json.loads((out / "study.json").read_text())
    assert (len(found["cells"]), found["failed"], found["differ"]) == (5, {}, [])
    auto, drop = (found["cells"][f"bytes-{name}-2-0"] for name in ("auto", "shrink-drop"))
    assert min(auto["injected"], drop["injected"]) > 0
    assert drop["batches_dropped"] > 0 == auto["batches_dropped"]
    assert drop["digests"] != auto["digests"], "what is dropped is missing in the weights"
    assert len(found["checks"]) == 2
    assert all(check["same_bits"] for check in found["checks"]), (
        "one process finds the same, with batches dropped and without"
    )
    assert "auto" in (out / "study.html").read_text()
    assert not list(out.glob("run-*"))


@pytest.mark.matrix
@pytest.mark.timeout(120)
def test_what_one_process_finds_without_the_dropped_batches_differs(tmp_path: Path) -> None:
    """The check can fail: it is told of no batch that was dropped."""
    from swift_ft.lab.study import running
    from swift_ft.lab.study.settings import Cell, Settings

    settings = Settings(
        tasks=("bytes",),
        strategies=("auto",),
        rates=(4.0,),
        seeds=1,
        steps=20,
        checkpoint_every=5,
        repair_s=1.0,
    )
    cell = Cell(task="bytes", strategy="auto", rate=4.0, seed=0)
    first = running.calculate(cell, settings, RESULT, tmp_path)
    other = running.calculate(cell, settings, RESULT | {"fewer": [[3, [0]]]}, tmp_path)
    assert first["calculated"] != other["calculated"]
    assert not first["same_bits"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rates", "0"), "above 0 and at most 20"),
        (("--task", "letters"), "there are bytes, digits"),
        (("--out", "/proc/study"), "name a directory that can be written"),
    ],
)
def test_what_is_refused_in_one_line(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    run = subprocess.run(
        study(tmp_path / "study", *words), check=False, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    assert told in run.stderr
    assert len(run.stderr.splitlines()) == 1
