"""Other recovery groups in a job that runs: an operator says so, a checkpoint puts them in force, losses between them.

Every drill is bitwise equal to the run that never failed, and what each step gave to the log is what follows from the
groups that it was logged by.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from swift import events
from tests.integration.drill_world import COMMAND, Outcome, Twins, drill, kills, passed
from tests.integration.test_recovery_groups import BATCH_BYTES, BOUNDARY_BYTES, NORM_BYTES, replayed

pytestmark = pytest.mark.timeout(300)

RANKS = ["0", "1", "2", "3"]


def of_boundaries(number: int) -> int:
    return number * 2 * BOUNDARY_BYTES + 2 * BATCH_BYTES + len(RANKS) * NORM_BYTES


def bytes_by_groups(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    sizes = report["prediction"]["bytes"]
    assert sizes["equal"] is True
    assert sizes["in_log"]["equal"] is True
    return {
        " and ".join(entry["logged_by"]): (entry["predicted"], entry["measured"])
        for entry in sizes["by_groups"]
    }


def test_losses_before_and_after_the_groups_are_in_force(twins: Twins, tmp_path: Path) -> None:
    """Stages 0 and 1 are logged from each other, then not any more."""
    words = [
        "--steps",
        "22",
        "--groups",
        "0,1,2,3",
        "--regroup",
        "step=7,by=12,groups=0-1,2-3",
        "--spares",
        "2",
    ]
    specs = ["rank=1,step=8,microbatch=1", "rank=1,step=13,microbatch=2", "rank=2,step=18"]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    found = report["prediction"]["regroups"]
    assert found["asked"][0]["said"] == 'job drill gets groups="0-1,2-3", from the next checkpoint on'
    assert found["in_force"] == [{"groups": "0,1,2,3", "since": 0}, {"groups": "0-1,2-3", "since": 10}]
    assert found["logged_from"] == {"0-1,2-3": dict.fromkeys(RANKS, 10)}
    between, behind, later = report["recoveries"]
    assert between["strategy"]["1"] == "replay"
    assert "replay" not in [between["strategy"][stage] for stage in ("0", "2", "3")]
    assert {behind["strategy"][stage] for stage in ("0", "1")} == {"replay"}
    assert {later["strategy"][stage] for stage in ("2", "3")} == {"replay"}
    sizes = bytes_by_groups(report)
    assert sizes["0,1,2,3"] == (of_boundaries(3), of_boundaries(3))
    assert sizes["0-1,2-3"] == (of_boundaries(1), of_boundaries(1))


def test_groups_that_log_more_are_replayed_alone_behind_the_checkpoint(twins: Twins, tmp_path: Path) -> None:
    """What passes between stages 0 and 1, and 2 and 3, is logged from version 10 on only."""
    words = [
        "--steps",
        "22",
        "--groups",
        "0-1,2-3",
        "--regroup",
        "step=6,by=16,groups=0,1-2,3",
        "--spares",
        "2",
    ]
    report = passed(drill(*words, *kills("rank=0,step=18,microbatch=2"), twins=twins, at=tmp_path))
    assert report["exact"] is True
    found = report["prediction"]["regroups"]
    assert found["in_force"][1]["groups"] == "0,1-2,3"
    since = found["in_force"][1]["since"]
    assert found["logged_from"] == {"0,1-2,3": dict.fromkeys(RANKS, since)}
    assert since in (10, 15)
    assert replayed(report["recoveries"][0])[0] == "0"
    assert report["recoveries"][0]["strategy"]["0"] == "replay"
    assert report["recoveries"][0]["strategy"]["1"] != "replay"
    sizes = bytes_by_groups(report)
    assert sizes["0-1,2-3"] == (of_boundaries(1), of_boundaries(1))
    assert sizes["0-1,2-3 and 0,1-2,3"] == (of_boundaries(3), of_boundaries(3))
    assert sizes["0,1-2,3"] == (of_boundaries(2), of_boundaries(2))


@pytest.mark.matrix
def test_a_plan_of_what_the_running_job_has_measured_is_applied(twins: Twins, tmp_path: Path) -> None:
    """`swift-ft plan --storage-cap … --apply`, while steps are under way: a cap that leaves one boundary to log."""
    every, steps = 10, 162
    cap = (every + 1) * of_boundaries(1)
    words = ["--steps", str(steps), "--checkpoint-every", str(every), "--groups", "0,1,2,3"]
    words += ["--regroup", f"step=6,until=140,by=152,storage-cap={cap}"]
    place = tmp_path / "drill"
    words += ["--directory", str(place), *kills(f"rank=1,step={steps - 4}")]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    trace = events.read(place / "run" / "events")
    asked = max(e["t"] for e in trace if e["event"] == "started" and e["service"] == "regroup0")
    (done,) = [e["t"] for e in trace if e["event"] == "regroup"]
    assert [e for e in trace if e["event"] == "step_end" and asked < e["t"] < done], "no step was under way"
    found = report["prediction"]["regroups"]
    groups = found["in_force"][1]["groups"]
    assert found["asked"][0]["said"] == f'job drill gets groups="{groups}", from the next checkpoint on'
    assert groups in ("0,1-3", "0-1,2-3", "0-2,3")
    assert bytes_by_groups(report)[groups] == (of_boundaries(1), of_boundaries(1))
    together = next(run for run in ("0-1", "0-2", "1-3", "1") if run in groups.split(","))
    first, last = int(together[0]), int(together[-1])
    for stage in range(first, last + 1):
        assert report["recoveries"][0]["strategy"][str(stage)] == "replay"


REPLICAS = ["--stages", "3", "--replicas", "2", "--steps", "22", "--groups", "0,1,2"]
AWAY = ["rank=2,step={},microbatch=2,phase=forward", "rank=3,step={},microbatch=2,phase=forward"]
"""Both data-parallel ranks of stage 1."""


def lost_to(report: dict[str, Any]) -> list[set[str]]:
    """The stages that each recovery replayed."""
    return [
        {stage for stage, name in recovery["strategy"].items() if name == "replay"}
        for recovery in report["recoveries"]
    ]


@pytest.mark.matrix
def test_with_replicas_a_stage_that_is_lost_whole_before_between_and_after(
    twins: Twins, tmp_path: Path
) -> None:
    words = [*REPLICAS, "--regroup", "step=7,by=12,groups=0-1,2", "--spares", "6"]
    specs = [spec.format(step) for step in (3, 8, 13) for spec in AWAY]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    found = report["prediction"]["regroups"]
    assert found["in_force"] == [{"groups": "0,1,2", "since": 0}, {"groups": "0-1,2", "since": 10}]
    assert lost_to(report) == [{"1"}, {"1"}, {"0", "1"}]
    assert report["prediction"]["bytes"]["equal"] is True


def test_with_replicas_what_a_copied_rank_has_not_logged_is_not_needed_behind_the_checkpoint(
    twins: Twins, tmp_path: Path
) -> None:
    """One replica of stage 1 is copied while the groups are wanted; then both are lost, and replayed by these."""
    words = [*REPLICAS, "--regroup", "step=7,by=12,groups=0-1,2", "--spares", "4"]
    specs = ["rank=3,step=8,microbatch=1", *(spec.format(14) for spec in AWAY), "rank=1,step=18"]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    copied, replayed, again = report["recoveries"]
    assert (copied["strategy"]["1"], again["strategy"]["0"]) == ("replica", "replica")
    assert {replayed["strategy"][stage] for stage in ("0", "1")} == {"replay"}
    assert report["prediction"]["regroups"]["in_force"][1]["groups"] == "0-1,2"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--regroup", "step=4,groups=0-1,2-3"], "--regroup needs --groups"),
        (["--groups", "0,1,2,3", "--regroup", "step=4,groups=0-1"], "are of 2 stages, the pipeline has 4"),
        (["--groups", "0,1,2,3", "--regroup", "step=40,groups=0-1,2-3"], "below --steps 15"),
        (
            ["--groups", "0,1,2,3", "--regroup", "step=4,groups=0-3"],
            "nothing is logged within one group of all",
        ),
        (["--groups", "0,1,2,3", "--regroup", "soon"], "write step=8,groups=0-1,2-3 or"),
        (
            ["--groups", "0,1,2,3", "--regroup", "step=4,storage-cap=1MB", "--replicas", "2"],
            "storage-cap does not go with --replicas 2",
        ),
    ],
)
def test_regroups_that_cannot_be_are_refused_in_one_line(arguments: list[str], word: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2, Outcome(done.returncode, done.stdout, done.stderr, None).explain()
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1
