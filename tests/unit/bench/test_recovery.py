"""What the comparison with peers makes of the marks that trainers leave: figures, goals, a table, a drawing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_ft.lab.bench import recovery as report
from swift_ft.lab.bench.command import main
from swift_ft.lab.bench.marks import read
from swift_ft.lab.bench.peers.trial import PLACES, Trial, make_model

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


def both(at: float, step: int, first: int = 1, second: int = 3) -> list[Any]:
    """The new process a quarter of a second later."""
    return [stepped(at, first, 0, step), stepped(at + 0.25, second, 1, step)]


GONE_ON = [*REPLACED, *both(12.0, 4), *both(13.0, 5)]


def test_a_replica_takes_the_place() -> None:
    broken = mark("broken", 10.5, pid=1, replica=0, step=4)
    assert report.judge(run_with([broken, *GONE_ON]), "a") == {
        "step_s": 1.0,
        "next_step_s": 3.0,
        "lost_s": 1.0,
        "detect_s": 0.5,
        "all_again_s": 3.25,
        "steps_again": 0,
        "steps_with_fewer": 0,
        "pids": [[1], [2, 3]],
        "restarted": 1,
        "survived": True,
        "same_bits": True,
    }


@pytest.mark.parametrize(("first", "lost_s"), [(10.25, 2.0), (9.75, 3.0)])
def test_who_has_the_gradients_of_the_step_of_the_kill_stands_still_behind_it(
    first: float, lost_s: float
) -> None:
    """Two new steps are done after the kill, or one."""
    found = report.judge(run_with([stepped(first, 1, 0, 4), *REPLACED, *both(14.0, 5)]), "a")
    assert (found["next_step_s"], found["lost_s"], found["steps_with_fewer"]) == (4.0, lost_s, 0)


def test_steps_that_are_done_again_are_not_new() -> None:
    again = [stepped(11.0 + step, pid, replica, step) for step in (2, 3) for pid, replica in ((5, 0), (6, 1))]
    found = report.judge(run_with([*again, *both(19.0, 4, 5, 6), *both(20.0, 5, 5, 6)]), "a")
    assert (found["steps_again"], found["restarted"], found["next_step_s"]) == (2, 2, 10.0)


def test_steps_of_one_replica_alone_are_counted() -> None:
    alone = [stepped(15.0, 1, 0, 4), stepped(16.0, 1, 0, 5)]
    found = report.judge(run_with([*alone, *REPLACED, *both(17.0, 6)]), "a")
    assert (found["next_step_s"], found["all_again_s"], found["steps_with_fewer"]) == (6.0, 7.25, 1)
    assert report.judge(run_with(alone), "a")["all_again_s"] is None


def test_who_comes_back_too_late_does_no_step_of_the_run() -> None:
    late = [stepped(15.0, 1, 0, 4), stepped(16.0, 1, 0, 5), stepped(100.0, 3, 1, 0)]
    assert report.judge(run_with(late), "a")["steps_again"] == 0


@pytest.mark.parametrize("digests", [("a", "b"), ("b", "b"), ("a",), ()])
def test_bits_differ(digests: tuple[str, ...]) -> None:
    left = run_with(GONE_ON, digests)
    assert report.judge(left, "a")["same_bits"] is False


def test_a_system_that_does_not_go_on_is_said() -> None:
    assert report.judge(run_with([], ()), "a") == {"failed": "no step was begun and done after the kill"}
    assert "failed" in report.judge([], "a")
    found = report.summary("torchrun", [{"failed": "no step was begun and done after the kill"}], QUIET)
    assert "torchrun, DCP: no step was begun and done after the kill" in report.text([found], [])


def test_medians_and_bits_of_all_rounds() -> None:
    left = run_with(GONE_ON)
    rounds = [report.judge(left, "a"), report.judge(left, "other")]
    rounds[1]["next_step_s"] = 4.0
    found = report.summary("swift", rounds, QUIET)
    assert (found["next_step_s"], found["same_bits"]) == (3.5, False)
    assert "3.50 s" in report.row(found, None)


def test_a_survivor_that_is_started_again_did_not_survive() -> None:
    again = report.judge(run_with([*both(19.0, 4, 5, 6), *both(20.0, 5, 5, 6)]), "a")
    kept = report.judge(run_with(GONE_ON), "a")
    assert (again["survived"], kept["survived"]) == (False, True)
    gone = [found for found in run_with(GONE_ON) if found["what"] != "ended"]
    assert report.judge(gone, "a")["survived"] is False, "it did not come to the end"


def test_points_are_those_of_the_seed() -> None:
    drawn = report.points(3, 200, 50, 60)
    assert drawn == report.points(3, 200, 50, 60) != report.points(4, 200, 50, 60)
    assert {point.step for point in drawn} == set(range(50, 61))
    assert {point.place for point in drawn} == set(PLACES)
    assert report.points(3, 5, 50, 60) == drawn[:5], "more kills begin with the same ones"


def case(system: str, lost_s: float, **changes: Any) -> dict[str, Any]:
    measured = report.judge(run_with(GONE_ON), "a")
    return report.summary(system, [measured | {"lost_s": lost_s} | changes], QUIET)


def verdicts(*cases: dict[str, Any]) -> list[bool | None]:
    return [found["met"] for found in report.goals(cases)]


def test_goals() -> None:
    """Beside torchrun; torchft that loses no batch; torchft alone; survivors; bits."""
    torchrun, swift = case("torchrun", 10.0, survived=False), case("swift", 0.5)
    both, alone = case("torchft-all", 5.0), case("torchft", 4.0, same_bits=False)
    peers = torchrun, both, alone
    assert verdicts(*peers, swift) == [True] * 5
    assert report.goals([*peers, swift])[0]["value"] == pytest.approx(20)
    assert verdicts(*peers, case("swift", 1.25)) == [False, True, True, True, True]
    assert verdicts(*peers, case("swift", 4.5)) == [False, True, False, True, True]
    assert verdicts(torchrun, case("torchft-all", 0.4), alone, swift)[1] is False
    assert verdicts(*peers, case("torchft-all-tuned", 0.4), swift)[1] is False
    again = case("torchft-all-tuned", 0.4, steps_again=3)
    assert verdicts(*peers, again, swift)[1] is True, "not without steps"
    assert verdicts(*peers, case("torchft-tuned", 0.4), swift)[1:3] == [True, False]
    assert verdicts(*peers, swift, case("swift-shrink", 0.5, survived=False))[3] is False
    assert verdicts(*peers, swift, case("swift-lossy-forward", 0.5, same_bits=False))[4] is True
    assert verdicts(*peers, swift, case("swift-replay", 0.5, same_bits=False))[4] is False
    assert verdicts(torchrun, swift, {"system": "torchft", "missing": "left out"})[1:3] == [None, None]
    assert verdicts(torchrun) == [None] * 5
    seldom = case("torchft-all-tuned", 0.4) | {"kills": 5}
    assert verdicts(*peers, seldom, swift)[1] is True, "it has not gone on after each kill"
    assert "(1 of 5 went on)" in report.row(seldom, None)[0]
    stuck = report.summary("swift-replay", [{"failed": "no step was begun and done after the kill"}], QUIET)
    assert verdicts(*peers, swift, stuck)[3:] == [False, False], (
        "one of ours that did not go on is not left out"
    )
    assert [report.goal(found).rpartition(" ")[2] for found in report.goals([torchrun, swift])] == [
        "met",
        "measured",
        "measured",
        "met",
        "met",
    ]


def test_the_table_has_what_a_system_costs_over_torchrun() -> None:
    base = {"step_s": 0.001, "peak_mib": 250.0}
    cells = report.row(case("swift", 0.5), base)
    assert {"swift, auto", "0.50 s", "2.0 ms", "+1.0 ms", "+50 MiB", "1 of 1"} <= set(cells)
    assert len(report.HEAD) == len(cells)


def test_a_peer_that_cannot_be_had_is_left_out_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torchft" / "bin").mkdir(parents=True)
    python = tmp_path / "torchft" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    path = tmp_path / "found.json"
    words = ["--system", "torchft", "--system", "nvrx", "--peers", str(tmp_path), "--json", str(path)]
    assert main(["recovery", *words]) == 0
    said = capsys.readouterr().out
    assert f"left out: {python} has no torchft (pip install torch numpy torchft==" in said
    cases = json.loads(path.read_text())["cases"]
    assert [case["system"] for case in cases] == ["torchft", "nvrx"]
    assert all("pip install" in case["missing"] for case in cases)


TRIAL = Trial(directory="", steps=9, kill_step=4, every=2, wait_s=0.0)


def test_a_batch_depends_on_replica_and_step_alone() -> None:
    model = make_model()
    losses = [TRIAL.loss(model, replica, step) for replica in range(2) for step in range(3)]
    assert len({float(loss.detach()) for loss in losses}) == 6
    assert losses[4] == TRIAL.loss(make_model(), 1, 1)


def test_only_the_victim_dies_and_only_once(tmp_path: Path) -> None:
    trial = replace(TRIAL, directory=str(tmp_path))
    (tmp_path / "killed").touch()
    trial.maybe_die(1, 4, "forward")
    never = replace(TRIAL, directory=str(tmp_path / "never"))
    never.maybe_die(0, 4, "forward")
    never.maybe_die(1, 4, "backward")
    never.maybe_die(1, 5, "forward")
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
