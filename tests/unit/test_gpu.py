"""`scripts/gpu`: its plan, what it makes of parts that fail, and its rehearsal on the simulated device."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.device import simulated
from tests.gpu import __main__ as gpu
from tests.gpu import pack
from tests.gpu.__main__ import FAIL, NOT_RUN, PASS, Figures, NotRun, Outcome, Part, Place
from tests.patience import eventually

needs_a_compiler = pytest.mark.skipif(
    simulated.compiler() is None, reason="no C++ compiler: g++ makes the simulated device"
)


def rehearse(directory: Path, *words: str) -> dict[str, Figures]:
    simulated.library()  # its parts find it compiled
    found = directory / "found.json"
    command = [sys.executable, "-m", "tests.gpu", "--dry-run", "--json", str(found), *words]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(found.read_text())
    assert "the simulated device" in document["machine"]
    assert {part["verdict"] for part in document["parts"]} == {PASS}
    return {part["name"]: part["figures"] for part in document["parts"]}


@needs_a_compiler
def test_a_short_rehearsal(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "--part", "twice")
    assert found["twice"]["tensors"] > 50


@needs_a_compiler
@pytest.mark.matrix
@pytest.mark.timeout(gpu.WHOLE_S * gpu.SHARED)
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    assert rehearse(tmp_path).keys() == {part.name for part in gpu.PARTS}


def test_the_plan_fits_into_its_time() -> None:
    assert sum(part.limit_s for part in gpu.PARTS) <= gpu.WHOLE_S


def attempt(directory: Path, *code: str, limit_s: float = 60.0, dry: bool = False) -> Outcome:
    def run(place: Place) -> Figures:
        place.run("timeit", "-n1", "-r1", "\n".join(code))
        return {"a": 1}

    part = Part(name="part", limit_s=limit_s, shows="", run=run)
    return gpu.attempt(part, directory / "part", dry=dry, facts={})


def test_a_part_that_hangs_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        "import pathlib, subprocess, time",
        "other = subprocess.Popen(['sleep', '600'])",
        f"pathlib.Path({str(started)!r}).write_text(str(other.pid))",
        "print('so far', flush=True)",
        "time.sleep(600)",
    )
    began = time.monotonic()
    outcome = attempt(tmp_path, *code, limit_s=10.0)
    assert time.monotonic() - began < 60
    assert (outcome.verdict, outcome.why) == (FAIL, "not at its end after 10 s: so far")
    pid = int(started.read_text())

    def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(gone)  # a signal takes its time


def test_a_part_that_fails_says_its_last_words(tmp_path: Path) -> None:
    outcome = attempt(tmp_path, "raise RuntimeError('no such device')")
    assert outcome.verdict == FAIL
    assert "RuntimeError: no such device" in outcome.why
    assert not outcome.figures


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((PASS, PASS), 0),
        ((PASS, NOT_RUN), 0),
        ((PASS, FAIL, NOT_RUN), 1),
        ((NOT_RUN,), 3),
    ],
)
def test_the_exit_code_says_failure_and_not_skip(verdicts: tuple[str, ...], code: int) -> None:
    assert gpu.code_of([Outcome(name="", seconds=0, verdict=verdict) for verdict in verdicts]) == code


@pytest.mark.parametrize(("version", "why"), [([2, 28, 9], "NCCL 2.28.9 is here"), ([], "is not known")])
def test_nccl_that_cannot_be_run_is_said(version: list[int], why: str, tmp_path: Path) -> None:
    with pytest.raises(NotRun, match=why):
        gpu.nccl(Place(tmp_path, 1.0, dry=False, facts={"nccl": version}))


def test_tensors_that_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}])
    monkeypatch.setattr(Place, "json", lambda *_: next(answers))
    with pytest.raises(gpu.Failed, match=r"1 of 2 tensors differ, the first one is \['b'\]"):
        gpu.twice(Place(tmp_path, 1.0, dry=True, facts={}))


def test_the_page_is_a_table() -> None:
    outcomes = [
        Outcome(name="facts", seconds=3.2, verdict=PASS, figures={"a": 1, "b": "x | y"}),
        Outcome(name="nccl", seconds=0, verdict=NOT_RUN, why="no NCCL"),
    ]
    rows = gpu.page("a GPU", outcomes, "2026-11-29").splitlines()[2:]
    assert rows == [
        "| part | verdict | s | |",
        "|---|---|---|---|",
        "| facts | PASS | 3 | a: 1; b: x / y |",
        "| nccl | NOT RUN | 0 | no NCCL |",
    ]


def test_what_is_packed_is_what_trainers_and_drills_need() -> None:
    names = {pack.name_of(each) for each in pack.wanted()}
    assert {"grpcio", "numpy", "rich", "pytest"} <= names
    assert not names & {"torch", "matplotlib", "scipy"}  # torch is there; the others are large
