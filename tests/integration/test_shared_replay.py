"""Ranks that help to replay a lost stage: real processes, real kills, every bit compared. docs/replay.md."""

from pathlib import Path
from typing import Any

import pytest

from tests.device import simulated
from tests.integration.drill_world import LEASE_S, Twins, assert_no_lease_ended, drill, kills, passed
from tests.integration.trainer_world import Run, check_same, named, run_trainer

pytestmark = pytest.mark.timeout(300)

STEPS, SAVED = 8, 4
"""The checkpoint that is replayed from is of version 4: a loss waits until that is complete."""


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_trainer(
        tmp_path_factory.mktemp("helping-twin"), "helping.py", "exact", STEPS, ranks=4, faults=[]
    )


def shared(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for recovery in report["recoveries"] for one in recovery["shared_replays"]]


def test_the_first_and_the_last_stage(twins: Twins, tmp_path: Path) -> None:
    """Seven microbatches for three ranks; each victim's replay is shared."""
    specs = ["rank=0,step=4", "rank=3,step=9,phase=backward"]
    arguments = ["--helpers", "2", "--microbatches", "7", "--spares", "2"]
    report = passed(drill(*arguments, *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    assert [(one["rank"], one["helpers"]) for one in shared(report)] == [(0, [1, 2]), (3, [2, 1])]
    for one, recovery in zip(shared(report), report["recoveries"], strict=True):
        assert one["shares"] == [3, 2, 2]
        assert one["alone_because"] == ""
        assert one["steps"] > 0
        assert list(one["microbatches"].values()) == [3 * one["steps"], 2 * one["steps"]]
        # A survivor that lags by a step replays it beside: there the two feed each other, alone.
        assert recovery["steps_replayed"] >= one["steps"]
        assert recovery["verified_sends"] > 0


def test_a_helper_is_killed(twins: Twins, tmp_path: Path) -> None:
    """Its rank is replayed as well; the first owner goes on from where it was."""
    specs = ["rank=2,step=9", "rank=1,phase=replay,microbatch=1"]
    arguments = ["--helpers", "2", "--microbatches", "7", "--spares", "2"]
    outcome = drill(*arguments, *kills(*specs), twins=twins, at=tmp_path)
    report = passed(outcome)
    assert report["exact"] is True
    assert len(report["recoveries"]) == 1
    # One more where a suspicion came long before its death.
    assert len(report["recoveries"][0]["generations"]) >= 2
    interrupted(report, helper=1, owner=2)


def interrupted(report: dict[str, Any], helper: int, owner: int) -> None:
    """What the report says of it: the owner did nothing twice, and whoever was left helped it again."""
    (cut,) = report["recoveries"][0]["interruptions"]
    assert (cut["helper"], cut["owner"], cut["steps_again"]) == (helper, owner, 0)
    # It ends with what is noticed of a death: no lease, and no timeout of those that waited for the helper.
    assert_no_lease_ended(report["recoveries"][0])
    assert report["recoveries"][0]["survivors_freed_seconds"] < LEASE_S


def helping(directory: Path, mode: str, rank: int = 2, spares: int = 1) -> Run:
    # By then all ranks are in that step.
    fault = {"rank": rank, "step": 7, "microbatch": 1, "phase": "backward", "hold": True}
    return run_trainer(
        directory, "helping.py", mode, STEPS, ranks=4, faults=[fault], spares=spares, saved=SAVED
    )


def once(run: Run, rank: int) -> list[int]:
    """The steps that a rank has replayed, each of them once."""
    steps = [e["step"] for e in named(run, "step_end") if e["replay"] and e["rank"] == rank]
    assert len(set(steps)) == len(steps)
    return sorted(steps)


def test_a_helper_dies_before_it_has_the_stage(twin: Run, tmp_path: Path) -> None:
    """Its owner waits for it to say whether it helps: that wait ends with the helper."""
    run = helping(tmp_path, "dying", rank=3, spares=2)
    assert once(run, 3) == [4, 5, 6]
    first, last = named(run, "plan")
    assert 1 in next(help["helpers"] for help in first["help"] if help["owner"] == 3)
    # The first line was never made. In the second plan two stages are lost: whichever of them has taken longer in what
    # was measured is helped first, and that may be the helper's own.
    owners = [help["owner"] for help in last["help"]]
    assert owners
    begun = {(event["rank"], event["generation"]) for event in named(run, "help_begin")}
    assert begun == {(owner, last["generation"]) for owner in owners}
    same(run, twin)


@pytest.mark.matrix
def test_a_helper_hangs(twin: Run, tmp_path: Path) -> None:
    """Its lease ends that, as everywhere else; what its owner had replayed by then is kept."""
    run = helping(tmp_path, "hanging", spares=2)
    (expired,) = named(run, "lease_expired")
    assert expired["rank"] == 1
    assert once(run, 2) == [4, 5, 6]
    hung = max(e["t"] for e in named(run, "help_begin") if e["t"] < expired["t"])
    assert expired["t"] - hung < 2 * LEASE_S
    same(run, twin)


def same(run: Run, twin: Run) -> None:
    """Bit for bit, at the end and at the recovery."""
    check_same(run, twin)
    assert twin["digests"].keys() <= run["digests"].keys()
    recovered = {name.split("-")[0] for name in run["digests"] if "-g" in name}
    assert recovered == {f"rank{rank}" for rank in range(4)}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.matrix), 3])
def test_what_trainers_do(rank: int, twin: Run, tmp_path: Path) -> None:
    run = helping(tmp_path, "exact", rank)
    helped_exactly(run, twin)


@pytest.mark.matrix
@pytest.mark.skipif(simulated.compiler() is None, reason="no C++ compiler: g++ makes the simulated device")
def test_what_trainers_do_on_a_device(tmp_path: Path) -> None:
    """Under its autocast."""
    simulated.library()  # the ranks find it compiled
    twin = run_trainer(tmp_path / "twin", "helping.py", "device", STEPS, ranks=4, faults=[])
    helped_exactly(helping(tmp_path / "run", "device", 3), twin)


def helped_exactly(run: Run, twin: Run) -> None:
    (begun,) = named(run, "help_begin")
    assert begun["shares"] == [2, 2, 1]  # a fourth rank would not make the largest share smaller
    assert begun["declined"] == {}
    (replay,) = named(run, "replay_end")
    assert replay["shared_steps"] == replay["steps"] == 3
    # A microbatch: one tensor sent, two from outside (at the end: one, and targets). A step: a norm.
    assert replay["verified"] + replay["filled"] == 3 * (5 * 3 + 1)
    helped = named(run, "helped")
    assert sorted(event["microbatches"] for event in helped) == [6, 6]
    assert not named(run, "refused")
    same(run, twin)


def test_a_helper_that_computes_something_else_is_found_out(twin: Run, tmp_path: Path) -> None:
    """The stage is replayed again, without help."""
    run = helping(tmp_path, "wrong")
    (refused, *_) = named(run, "refused")
    assert "the tensor that a helper computed" in refused["reason"]
    first, last = named(run, "plan")
    assert first["help"]
    assert "help" not in last
    assert [entry["strategy"] for entry in last["ranks"]].count("REPLAY") == 1
    (replay,) = named(run, "replay_end")
    assert replay["shared_steps"] == 0
    same(run, twin)


@pytest.mark.matrix
def test_whoever_cannot_help_does_not(twin: Run, tmp_path: Path) -> None:
    run = helping(tmp_path, "unable")
    (begun,) = named(run, "help_begin")
    assert begun["helpers"] == []
    assert "shares memory" in begun["declined"]["0"]
    assert "no room" in begun["declined"]["1"]
    assert "another module than the owner's" in begun["declined"]["3"]
    (replay,) = named(run, "replay_end")
    assert replay["shared_steps"] == 0
    assert replay["steps"] == 3
    same(run, twin)


@pytest.mark.matrix
@pytest.mark.parametrize(("schedule", "rank"), [("1f1b", 0), ("gpipe", 1), ("1f1b", 3)])
@pytest.mark.parametrize("microbatches", [4, 7])
@pytest.mark.parametrize("helpers", [0, 1, 2, 3])
def test_every_number_of_workers(
    helpers: int, microbatches: int, schedule: str, rank: int, twins: Twins, tmp_path: Path
) -> None:
    arguments = ["--helpers", str(helpers), "--microbatches", str(microbatches), "--schedule", schedule]
    report = passed(drill(*arguments, *kills(f"rank={rank},step=9,microbatch=2"), twins=twins, at=tmp_path))
    assert report["exact"] is True
    workers = [one["workers"] for one in shared(report)]
    largest = -(-microbatches // min(1 + helpers, microbatches))
    assert workers == ([-(-microbatches // largest)] if helpers else [])


@pytest.mark.matrix
def test_two_of_eight_ranks(twins: Twins, tmp_path: Path) -> None:
    """They are no neighbours. Six ranks are left to help, of which one may lag."""
    arguments = ["--stages", "8", "--helpers", "3", "--microbatches", "8", "--spares", "2"]
    specs = [f"rank={rank},step=9,phase=idle" for rank in (0, 4)]
    report = passed(drill(*arguments, *kills(*specs), twins=twins, at=tmp_path))
    assert len(report["recoveries"]) == 1
    first, second = (one["workers"] for one in shared(report))
    assert min(first, second) >= 3
