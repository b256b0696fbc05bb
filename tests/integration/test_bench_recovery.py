"""`swift-ft bench recovery` with real processes: a replica dies under torchrun, and under swift's strategies."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from swift_ft.lab.bench.command import main
from tests.patience import eventually


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("system", "again", "replaced"),
    [
        pytest.param("torchrun", 2, 2, marks=pytest.mark.matrix),
        ("swift", 0, 1),
        pytest.param("swift-reinit", 2, 1, marks=pytest.mark.matrix),
    ],
)
def test_it_runs(system: str, again: int, replaced: int, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    words = [
        "--system",
        system,
        "--kills",
        "1",
        "--steps",
        "15",
        "--checkpoint-every",
        "5",
        "--seed",
        "7",
    ]
    assert main(["recovery", *words, "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["cases"]
    assert (found["steps_again"], found["restarted"], found["same_bits"]) == (again, replaced, True)
    assert found["next_step_s"] <= found["all_again_s"]


LONG = ("--steps", "20000")
"""It would not come to its end by itself."""


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("words", "trainer"),
    [
        pytest.param(
            ("bench", "recovery", "--system", "torchrun", *LONG),
            "swift_ft.lab.bench.peers.torchrun_trainer",
            marks=pytest.mark.matrix,
        ),
        (("bench", "recovery", "--system", "swift", *LONG), "swift_ft.lab.bench.peers.swift_trainer"),
        pytest.param(
            ("study", "--quick", *LONG, "--rates", "0.5", "--out", "study"),
            "swift_ft.lab.study.trainers plain",
            marks=pytest.mark.matrix,
        ),
    ],
    ids=("torchrun", "swift", "study"),
)
def test_nothing_is_left_of_one_that_is_killed(words: tuple[str, ...], trainer: str, tmp_path: Path) -> None:
    started: dict[int, psutil.Process] = {}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "swift_ft.cli", *words],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        own = psutil.Process(process.pid)
        while sum(trainer in command_of(each) for each in started.values()) < 3:  # a launcher and its ranks
            assert process.poll() is None
            started |= {child.pid: child for child in own.children(recursive=True)}
            time.sleep(0.05)
        process.kill()
    eventually(lambda: not any(each.is_running() for each in started.values()), timeout_s=60.0)
    assert not list(tmp_path.glob("torchelastic_*"))
