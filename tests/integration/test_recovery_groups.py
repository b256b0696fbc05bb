"""Stages that recover together: only what passes between groups is in the log, and the loss of one replays its group.

`test_recovery_groups_matrix.py` has each kill in a run of its own, and the times.
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from swift_ft.lab.failures.damage import segment_files
from swift_ft.log import segment
from swift_ft.planner.groups import RecoveryGroups
from tests.integration.drill_world import Twins, drill, kills, passed

pytestmark = pytest.mark.timeout(300)

# Two steps behind the last checkpoint, of which the log is still there at the end.
SHAPE = ("--steps", "17")
BOUNDARY_BYTES, BATCH_BYTES, NORM_BYTES = 4 * 2 * 16 * 32 * 4, 4 * 2 * 16 * 8, 4


def logged(directory: Path, groups: str, boundaries: int) -> None:
    """The log has what passes between groups, to the byte, and nothing else of what passes between stages."""
    bytes_of: dict[str, Counter[int]] = defaultdict(Counter)
    for path in segment_files([directory / "run" / "log"], "*"):
        for record in segment.walk(path, verify_bodies=False).records:
            bytes_of[path.parent.name][record.header.key.step] += record.header.raw_bytes
    sizes = {
        "F": BOUNDARY_BYTES,
        "B": BOUNDARY_BYTES,
        "X": BATCH_BYTES,
        "T": BATCH_BYTES,
        "C": NORM_BYTES,
    }
    for stream, steps in bytes_of.items():
        assert [steps[step] for step in (15, 16)] == [sizes[stream[-1]]] * 2, stream
    starts = RecoveryGroups.parse(groups).starts[1:]
    wanted = {name for start in starts for name in (f"s{start - 1}.F", f"s{start}.B")}
    assert {stream for stream in bytes_of if stream[-1] in "FB"} == wanted
    assert len(wanted) == 2 * boundaries
    others = {"s0.X", "s3.T", *(f"r{rank}.C" for rank in range(4))} if boundaries else set()
    assert bytes_of.keys() - wanted == others


def replayed(recovery: dict[str, Any]) -> list[str]:
    return sorted(stage for stage, name in recovery["strategy"].items() if name != "keep")


def test_each_rank_dies_once_each_in_another_phase(twins: Twins, tmp_path: Path) -> None:
    specs = [
        "rank=1,step=3,microbatch=2,phase=forward",
        "rank=2,step=7,microbatch=1,phase=backward",
        "rank=0,step=9,phase=optimizer",
        "rank=3,step=12,phase=idle",
    ]
    words = [*SHAPE, "--groups", "0-1,2-3", "--spares", "2", "--directory", str(tmp_path / "drill")]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    logged(tmp_path / "drill", "0-1,2-3", 1)
    for recovery, lost in zip(report["recoveries"], [["0", "1"], ["2", "3"]] * 2, strict=True):
        # Who is cut off before it has all gradient norms is a step behind: its group does that step again, or more.
        assert replayed(recovery) in (lost, ["0", "1", "2", "3"])
        assert {recovery["strategy"][stage] for stage in lost} == {"replay"}
        assert recovery["verified_sends"] > 0
        assert "checkpoint" not in recovery["strategy"].values()
    assert "--groups 0-1,2-3" in report["rerun"]


def test_one_group_of_all_goes_back_to_the_checkpoint_and_logs_nothing(twins: Twins, tmp_path: Path) -> None:
    words = [*SHAPE, "--groups", "0-3", "--directory", str(tmp_path / "drill")]
    outcome = drill(*words, *kills("rank=2,step=8"), twins=twins, at=tmp_path)
    assert outcome.exit_code == 0, outcome.explain()
    report = outcome.report
    assert report is not None
    assert (report["verdict"], report["bitwise_equal"], report["survivors_kept"]) == ("PASS", True, True)
    assert set(report["strategy"].values()) == {"checkpoint"}
    assert report["log"]["records"] == report["log"]["bytes"] == 0
    logged(tmp_path / "drill", "0-3", 0)


@pytest.mark.matrix
def test_the_other_member_dies_while_the_group_replays(twins: Twins, tmp_path: Path) -> None:
    specs = ["rank=1,step=8,microbatch=1", "rank=2,phase=replay"]
    words = [*SHAPE, "--groups", "0,1-2,3", "--spares", "2", "--directory", str(tmp_path / "drill")]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    logged(tmp_path / "drill", "0,1-2,3", 2)
    # The replay may just be over when its death is noticed.
    assert sum(len(recovery["generations"]) for recovery in report["recoveries"]) == 2
    assert replayed(report) == ["1", "2"]
    assert set(report["strategy"].values()) == {"keep", "replay"}


def test_a_damaged_record_at_the_end_of_a_group_is_never_replayed(twins: Twins, tmp_path: Path) -> None:
    """Rank 1 reads it and refuses; rank 0, which waits for rank 1 in the same replay, comes free."""
    specs = ["rank=0,step=8,microbatch=1", "corrupt=log,step=8,stream=s2.B"]
    report = passed(drill(*SHAPE, "--groups", "0-1,2-3", *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is False, "this is the checkpoint's doing"
    assert set(report["strategy"].values()) == {"checkpoint"}
    assert "s2.B" in report["reason"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--groups", "0-1,3"], "--groups '0-1,3': each run begins behind the one before"),
        (["--groups", "0-1,2-7"], "--groups 0-1,2-7 are of 8 stages, the pipeline has 4"),
        (
            ["--groups", "0-3,4-7", "--schedule", "zbv"],
            "part stages 0 and 7, which are lost together with rank 0",
        ),
        (
            ["--groups", "0-1,2-3", "--kill", "rank=0,step=8", "--kill", "corrupt=log,step=8,stream=s1.B"],
            "s2.B",
        ),
        (["--groups", "0-3", "--kill", "rank=0,step=8", "--kill", "corrupt=log,step=8"], "reads no stream"),
        (["--groups", "0-3", "--kill", "rank=0,step=8", "--kill", "rank=1,phase=replay"], "replays nothing"),
    ],
)
def test_groups_that_cannot_be_are_refused_in_one_line(arguments: list[str], word: str) -> None:
    done = drill(*arguments)
    assert done.exit_code == 2, done.explain()
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1
