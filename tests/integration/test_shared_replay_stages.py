"""Ranks with several stages, and shared replays of them: real processes, real kills, every bit compared."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.drill_world import Twins, drill, kills, passed
from tests.integration.trainer_world import run_trainer

pytestmark = pytest.mark.timeout(300)

# Microbatches that three ranks do not divide, as many as the schedule takes or needs.
SCHEDULES = [("interleaved1f1b", 7), ("interleavedzerobubble", 7), ("zbv", 7), ("dualpipev", 8)]


def shared(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for recovery in report["recoveries"] for one in recovery["shared_replays"]]


def arguments(schedule: str, microbatches: int, helpers: int) -> list[str]:
    return ["--schedule", schedule, "--microbatches", str(microbatches), "--helpers", str(helpers)]


# The turn of a V, both ends of the pipeline on one rank, and two between others.
@pytest.mark.parametrize(
    ("schedule", "microbatches", "rank"),
    [
        (*SCHEDULES[0], 2),
        pytest.param(*SCHEDULES[1], 0, marks=pytest.mark.matrix),
        pytest.param(*SCHEDULES[2], 3, marks=pytest.mark.matrix),
        pytest.param(*SCHEDULES[3], 0, marks=pytest.mark.matrix),
    ],
)
def test_every_schedule(schedule: str, microbatches: int, rank: int, twins: Twins, tmp_path: Path) -> None:
    words = arguments(schedule, microbatches, 2)
    report = passed(drill(*words, *kills(f"rank={rank},step=9,microbatch=3"), twins=twins, at=tmp_path))
    assert report["exact"] is True
    (one,) = shared(report)
    assert one["rank"] == rank
    assert one["workers"] == 3
    assert one["alone_because"] == ""
    assert one["declined"] == {}
    assert sum(one["shares"]) == microbatches
    assert len(set(one["shares"])) == 2
    assert one["steps"] > 0
    # Of each microbatch both stages.
    helped = list(one["microbatches"].values())
    assert helped == [2 * one["steps"] * share for share in one["shares"][:2]]


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 2])
def test_what_trainers_do(rank: int, tmp_path: Path) -> None:
    """Autocast, checkpointed blocks, frozen, strided and sometimes unused parameters, inputs for every stage."""
    twin = run_trainer(tmp_path / "twin", "helping.py", "stages", 8, ranks=4, faults=[])
    # By then the checkpoint of version 4 is complete: three steps are left to replay.
    fault = {"rank": rank, "step": 7, "microbatch": 1, "phase": "backward", "hold": True}
    run = run_trainer(tmp_path / "run", "helping.py", "stages", 8, ranks=4, faults=[fault], saved=4)
    (begun,) = [event for event in run["events"] if event["event"] == "help_begin"]
    assert begun["shares"] == [2, 2, 1]
    assert begun["declined"] == {}
    (replay,) = [event for event in run["events"] if event["event"] == "replay_end"]
    assert replay["shared_steps"] == replay["steps"] == 3
    assert replay["microbatches"] == 3 * 5 * 2
    # A microbatch: a stage sends two tensors and has an input; at the ends it sends one, and has an input more or a
    # target. A step: a norm.
    assert replay["verified"] + replay["filled"] == 3 * (5 * 2 * 3 + 1)
    assert not [event for event in run["events"] if event["event"] == "refused"]
    for name, digests in twin["digests"].items():
        assert run["digests"][name] == digests, name


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("helpers", [1, 2, 3])
@pytest.mark.parametrize(("schedule", "microbatches"), [*SCHEDULES, ("interleaved1f1b", 8), ("dualpipev", 9)])
def test_every_number_of_workers(
    schedule: str, microbatches: int, helpers: int, rank: int, twins: Twins, tmp_path: Path
) -> None:
    words = arguments(schedule, microbatches, helpers)
    report = passed(drill(*words, *kills(f"rank={rank},step=9,microbatch=2"), twins=twins, at=tmp_path))
    assert report["exact"] is True
    (one,) = shared(report)
    assert one["steps"] > 0
    largest = -(-microbatches // (1 + helpers))
    assert one["workers"] == -(-microbatches // largest)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("schedule", "workers"), [("interleavedzerobubble", 2), ("zbv", 2), ("dualpipev", 2)]
)
def test_two_ranks_at_once(schedule: str, workers: int, twins: Twins, tmp_path: Path) -> None:
    """Ranks 0 and 2 of four are no neighbours in either form; two are left to help."""
    words = [*arguments(schedule, 8, 3), "--spares", "2"]
    specs = [f"rank={rank},step=9,phase=idle" for rank in (0, 2)]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    assert all(one["workers"] <= workers for one in shared(report))
