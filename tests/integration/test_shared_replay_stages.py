"""Ranks with several stages, and shared replays of them: real processes, real kills, every bit compared."""

from pathlib import Path

import pytest

from tests.integration.drill_world import Twins, drill, kills, passed
from tests.integration.test_shared_replay import shared

pytestmark = pytest.mark.timeout(300)

# Microbatches that three ranks do not divide, as many as the schedule takes or needs.
SCHEDULES = [("interleaved1f1b", 7), ("interleavedzerobubble", 7), ("zbv", 7), ("dualpipev", 8)]


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
def test_two_ranks_at_once(twins: Twins, tmp_path: Path) -> None:
    """Ranks 0 and 2 of four are no neighbours in a V; two are left to help."""
    words = [*arguments("zbv", 8, 3), "--spares", "2"]
    specs = [f"rank={rank},step=9,phase=idle" for rank in (0, 2)]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    assert sorted(one["rank"] for one in shared(report)) == [0, 2]
    assert all(one["workers"] <= 2 for one in shared(report))
