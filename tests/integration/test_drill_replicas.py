"""Data parallelism, end to end: kills in every phase of an update, several victims, copies that are cut short.

The failure-free run of each configuration is made by the first drill that needs it. `test_drill_replicas_matrix.py`
has each kill in a run of its own.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.lab.drill.run import TWIN_FILE
from tests.integration.drill_world import (
    Twins,
    drill,
    freed_by_the_notice,
    kills,
    passed,
)

pytestmark = pytest.mark.timeout(300)

PURE = ["--stages", "1", "--replicas", "2"]
HYBRID = ["--stages", "2", "--replicas", "2"]
WAIT_FREE = ["--updates", "wait_free"]


def recovered(report: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The recoveries, each by a copy and without a replay."""
    assert report["exact"] is True
    assert report["steps_replayed"] == 0
    assert report["microbatches_recomputed"] == 0
    assert len(report["recoveries"]) == count
    for recovery in report["recoveries"]:
        assert "replica" in recovery["strategy"].values()
        assert not {"replay", "catch_up", "checkpoint"} & set(recovery["strategy"].values())
        assert recovery["bytes_copied"] > 0
        freed_by_the_notice(recovery)
    return list(report["recoveries"])


def strategies(recovery: dict[str, Any]) -> list[str]:
    """Of each rank. Nothing keeps a victim from its next forward until ranks of other pipelines have left the barrier
    that ends the step before. Whom the loss catches there finishes its step: it holds as much as who was through."""
    ways = [way["strategy"] for way in recovery["ranks"].values()]
    return ["keep" if way == "roll_forward" else way for way in ways]


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [pytest.param(PURE, (1, 0, 1, 0), marks=pytest.mark.matrix), (HYBRID, (3, 0, 2, 1))],
    ids=["1x2", "2x2"],
)
def test_each_rank_dies_once_and_its_replica_gives_the_state(
    shape: list[str], ranks: tuple[int, ...], twins: Twins, tmp_path: Path
) -> None:
    specs = [
        f"rank={ranks[0]},step=3,microbatch=2,phase=backward",
        f"rank={ranks[1]},step=6,phase=reduce",
        f"rank={ranks[2]},step=9,phase=optimizer",
        f"rank={ranks[3]},step=12,microbatch=1,phase=forward",
    ]
    words = [*shape, "--spares", "2", *kills(*specs)]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    found = recovered(report, 4)
    assert [recovery["target_version"] for recovery in found] == [3, 6, 10, 12]
    assert [sorted(map(int, recovery["sources"])) for recovery in found] == [[rank] for rank in ranks]


@pytest.mark.parametrize(
    ("shape", "optimizer", "undo"),
    [
        (HYBRID, "sgd", "exact"),
        pytest.param(
            [*HYBRID, "--schedule", "interleavedzerobubble"], "adamw", "exact", marks=pytest.mark.matrix
        ),
        pytest.param(PURE, "amsgrad", "preimage", marks=pytest.mark.matrix),
    ],
    ids=["2x2-sgd", "2x2-zero-bubble-adamw", "1x2-amsgrad"],
)
def test_a_wait_free_update_is_taken_back(
    shape: list[str], optimizer: str, undo: str, twins: Twins, tmp_path: Path
) -> None:
    specs = [
        "rank=1,step=3,phase=update",
        "rank=0,step=6,phase=reduce",
        "rank=1,step=9,phase=optimizer",
        "rank=0,step=12,microbatch=3,phase=backward",
    ]
    words = [*shape, *WAIT_FREE, "--optimizer", optimizer, "--spares", "2"]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    found = recovered(report, 4)
    assert found[0]["target_version"] == 3
    assert report["undo"]["mode"] == undo
    assert report["undo"]["exact"] is True
    assert 0 in found[0]["undo"]["ranks"], "the replica of a rank that was half-way was so itself"
    assert found[0]["undo"]["buckets"] > 0


def test_distributed_data_parallel(twins: Twins, tmp_path: Path) -> None:
    specs = [
        "rank=3,step=3,microbatch=3,phase=backward",
        "rank=0,step=6,phase=reduce",
        "rank=2,step=9,phase=optimizer",
    ]
    words = [*HYBRID, "--data-parallel", "ddp", "--spares", "2"]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    recovered(report, 3)


@pytest.mark.matrix
def test_a_source_dies_in_the_copy_and_later_all_but_one_replica_at_once(
    twins: Twins, tmp_path: Path
) -> None:
    """With one spare: the others start cold. The sum of four is in the order of data-parallel ranks."""
    specs = ["rank=1,step=3,microbatch=1", "rank=0,phase=copy"]
    specs += [f"rank={rank},step=9,microbatch=1" for rank in (0, 1, 3)]
    report = passed(drill("--stages", "1", "--replicas", "4", *kills(*specs), twins=twins, at=tmp_path))
    first, second = recovered(report, 2)
    assert first["faults"] == ["fault0", "fault1"]
    assert len(first["generations"]) >= 2  # one more where a suspicion came long before its death
    assert {rank: sorted(sources) for rank, sources in first["sources"].items()} == {
        "0": [2, 3],
        "1": [2, 3],
    }
    assert second["sources"] == {"0": [2], "1": [2], "3": [2]}


@pytest.mark.matrix
def test_half_of_the_replicas_die_in_a_reduction_of_ddp(twins: Twins, tmp_path: Path) -> None:
    """What DDP has half reduced is in the gradients themselves: no survivor may go forward with them.

    This drill makes a failure-free run of its own, with a launcher: the same as the one without, in every version."""
    specs = [f"rank={rank},step=8,phase=reduce" for rank in (1, 2)]
    words = ["--stages", "1", "--replicas", "4", "--data-parallel", "ddp", *kills(*specs)]
    made = tmp_path / "twin"
    report = passed(drill(*words, "--twin", str(made), at=tmp_path))
    kept = twins.of(*words)
    assert json.loads((made / TWIN_FILE).read_text()) == json.loads((kept / TWIN_FILE).read_text())
    found = recovered(report, 1)
    assert found[0]["target_version"] == 8
    assert report["undo"]["rolled_forward"] == []


def test_a_joiner_dies_in_the_copy_and_later_two_stages_lose_a_replica_at_once(
    twins: Twins, tmp_path: Path
) -> None:
    specs = ["rank=1,step=4,microbatch=1", "rank=1,phase=copy"]
    specs += ["rank=0,step=9,microbatch=1", "rank=3,step=9,microbatch=1"]
    report = passed(drill(*HYBRID, "--spares", "2", *kills(*specs), twins=twins, at=tmp_path))
    first, second = recovered(report, 2)
    assert first["faults"] == ["fault0", "fault1"]
    assert len(first["generations"]) >= 2  # one more where a suspicion came long before its death
    assert strategies(second) == ["replica", "keep", "keep", "replica"]
    assert second["sources"] == {"0": [1], "3": [2]}


@pytest.mark.matrix
def test_no_whole_copy_is_left(twins: Twins, tmp_path: Path) -> None:
    """The only whole replica dies in the copy; in a later failure a copy is damaged, and which of the two nobody knows.

    The log is what is left: both data-parallel ranks of the stage are replayed, reducing their gradients again."""
    specs = ["rank=3,step=3,microbatch=1", "rank=2,phase=copy"]
    specs += ["rank=1,step=9,microbatch=1", "corrupt=copy,rank=1"]
    report = passed(drill(*HYBRID, *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    first, second = report["recoveries"]
    assert strategies(first) == ["keep", "keep", "replay", "replay"]
    assert first["verified_sends"] > 0
    assert first["microbatches_recomputed"] == 2 * 4 * 3
    assert strategies(second) == ["replay", "replay", "keep", "keep"]
    assert second["verified_sends"] > 0
