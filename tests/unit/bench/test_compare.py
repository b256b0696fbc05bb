"""The comparison with torchrun and torchft: what it makes of the marks that trainers leave."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift.bench import compare
from swift.bench.command import main
from swift.bench.compare_trial import Trial, make_model, read

QUIET = {"step_s": 0.002, "peak_mib": 300.0}


def mark(what: str, at: float, *, pid: int, replica: int | None, step: int | None = None, **more: Any) -> Any:
    return {"what": what, "at": at, "pid": pid, "replica": replica, "step": step, **more}


def run_with(after: list[Any], digests: tuple[str, ...] = ("a", "a")) -> list[Any]:
    """Steps 0 to 3 by both, then the kill in step 4 at 10.0 s."""
    before = [
        mark("stepped", 6.0 + step, pid=1 + replica, replica=replica, step=step)
        for step in range(4)
        for replica in range(2)
    ]
    killed = mark("killed", 10.0, pid=2, replica=1, step=4)
    last = {found["replica"]: found["pid"] for found in [*before, killed, *after]}
    ended = [mark("ended", 99.0, pid=last[n], replica=n, digest=digest) for n, digest in enumerate(digests)]
    return [*before, killed, *after, *ended]


REPLACED = [
    mark("imported", 11.0, pid=3, replica=None, started=10.5),
    mark("connected", 11.5, pid=3, replica=1),
]


def stepped(at: float, pid: int, replica: int, step: int) -> Any:
    return mark("stepped", at, pid=pid, replica=replica, step=step)


def test_a_replica_takes_the_place() -> None:
    marks = run_with([*REPLACED, stepped(12.0, 1, 0, 4), stepped(12.25, 3, 1, 4)])
    assert compare.judge(marks, "a") == {
        "step_s": 1.0,
        "next_step_s": 2.0,
        "all_again_s": 2.25,
        "steps_again": 0,
        "steps_with_fewer": 0,
        "pids": [[1], [2, 3]],
        "restarted": 1,
        "same_bits": True,
        "replacement_s": {"started": 0.5, "imported": 1.0, "connected": 1.5},
    }


def test_steps_that_are_done_again_are_not_new() -> None:
    again = [stepped(11.0 + step, pid, replica, step) for step in (2, 3) for pid, replica in ((5, 0), (6, 1))]
    found = compare.judge(run_with([*again, stepped(20.0, 5, 0, 4), stepped(20.0, 6, 1, 4)]), "a")
    assert (found["steps_again"], found["restarted"], found["next_step_s"]) == (2, 2, 10.0)


def test_steps_of_one_replica_alone_are_counted() -> None:
    alone = [stepped(15.0, 1, 0, 4), stepped(16.0, 1, 0, 5)]
    found = compare.judge(run_with([*alone, *REPLACED, stepped(17.0, 1, 0, 6), stepped(17.5, 3, 1, 6)]), "a")
    assert (found["next_step_s"], found["all_again_s"], found["steps_with_fewer"]) == (5.0, 7.5, 2)
    assert compare.judge(run_with(alone), "a")["all_again_s"] is None


def test_who_comes_back_too_late_does_no_step_of_the_run() -> None:
    late = [stepped(15.0, 1, 0, 4), stepped(100.0, 3, 1, 0)]
    assert compare.judge(run_with(late), "a")["steps_again"] == 0


@pytest.mark.parametrize("digests", [("a", "b"), ("b", "b"), ("a",), ()])
def test_bits_differ(digests: tuple[str, ...]) -> None:
    marks = run_with([stepped(11.0, 1, 0, 4), stepped(11.0, 3, 1, 4)], digests)
    assert compare.judge(marks, "a")["same_bits"] is False


def test_a_system_that_does_not_go_on_is_said() -> None:
    assert compare.judge(run_with([], ()), "a") == {"failed": "no step was done after the kill"}
    assert "failed" in compare.judge([], "a")
    found = compare.summary("torchrun", [{"failed": "no step was done after the kill"}], QUIET)
    assert compare.row(found).endswith("no step was done after the kill")


def test_medians_and_bits_of_all_rounds() -> None:
    marks = run_with([*REPLACED, stepped(12.0, 1, 0, 4), stepped(12.25, 3, 1, 4)])
    rounds = [compare.judge(marks, "a"), compare.judge(marks, "other")]
    rounds[1]["next_step_s"] = 4.0
    found = compare.summary("swift", rounds, QUIET)
    assert (found["next_step_s"], found["same_bits"]) == (3.0, False)
    assert "3.00 s" in compare.row(found)
    assert "2.00 ms  300 MiB" in compare.row(found)
    assert compare.way(found).endswith("started +0.50 s, imported +1.00 s, connected +1.50 s")


def test_a_system_that_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "compare.json"
    words = ["--system", "torchft", "--torchft", str(tmp_path / "no-python"), "--json", str(path)]
    assert main(["compare", *words]) == 0
    assert "give --torchft" in capsys.readouterr().out
    assert [case["system"] for case in json.loads(path.read_text())["cases"]] == ["torchft"]


@pytest.mark.parametrize("words", [["--kill-step", "5"], ["--steps", "1017"], ["--rounds", "0"]])
def test_bad_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 2
    assert "--kill-step" in capsys.readouterr().err


TRIAL = Trial(directory="", steps=9, kill_step=4, every=2, wait_s=0.0)


def test_a_batch_depends_on_replica_and_step_alone() -> None:
    model = make_model()
    losses = [TRIAL.loss(model, replica, step) for replica in range(2) for step in range(3)]
    assert len({float(loss.detach()) for loss in losses}) == 6
    assert losses[4] == TRIAL.loss(make_model(), 1, 1)


def test_only_the_victim_dies_and_only_once(tmp_path: Path) -> None:
    trial = replace(TRIAL, directory=str(tmp_path))
    (tmp_path / "killed").touch()
    trial.maybe_die(1, 4)
    replace(TRIAL, directory=str(tmp_path / "never")).maybe_die(0, 4)
    trial.mark("stepped", 0, 1)
    assert [found["what"] for found in read(trial.directory)] == ["stepped"]


def test_a_checkpoint_that_is_not_whole_is_not_loaded(tmp_path: Path) -> None:
    trial = replace(TRIAL, directory=str(tmp_path))
    assert trial.newest_checkpoint() is None
    for step in (200, 1000, 1100):
        (trial.checkpoints / str(step)).mkdir(parents=True)
    for step in (200, 1000):
        (trial.checkpoints / str(step) / ".metadata").touch()
    assert trial.newest_checkpoint() == trial.checkpoints / "1000"
