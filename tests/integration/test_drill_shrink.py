"""Drills of the strategy "shrink": replicas of a whole model that go on without a lost rank, and with it again."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.drill_world import PHASES, STEPS, Twins, drill, kills, passed, shape
from tests.integration.drill_world import spec as spec_at

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
STEP = 6


def shrink(replicas: int, *words: str) -> list[str]:
    return [*shape(1, replicas), "--strategy", "shrink", *words]


def exact(report: dict[str, Any], *vacant: list[int]) -> dict[str, Any]:
    """`vacant`: the slots without a rank, behind each recovery."""
    assert report["exact"] is True
    shown: dict[str, Any] = report["shrink"]
    assert shown["vacant_after"] == list(vacant)
    ranks = range(report["topology"]["ranks"])
    assert shown["compared_at_end"] == [rank for rank in ranks if rank not in vacant[-1]]
    return shown


def spec(rank: int, phase: str, step: int = STEP) -> str:
    return spec_at(rank, phase, step)


def late(stages: int, replicas: int, *words: str) -> list[str]:
    return [*shape(stages, replicas), "--strategy", "auto", "--lost-shard", "redistribute", *words]


@pytest.mark.parametrize(
    ("size", "phase"),
    [
        ((1, 4), "backward"),
        pytest.param((2, 2), "reduce", marks=MATRIX),
        *(pytest.param((1, 2), phase, marks=MATRIX) for phase in PHASES),
        *(pytest.param((2, 2), phase, marks=MATRIX) for phase in PHASES if phase != "reduce"),
    ],
)
def test_auto_goes_on_without_a_rank_for_which_no_process_comes(
    size: tuple[int, int], phase: str, twins: Twins, tmp_path: Path
) -> None:
    """Its launcher has none left."""
    report = passed(drill(*late(*size), *kills(spec(1, phase)), twins=twins, at=tmp_path))
    exact(report, [1])


@pytest.mark.parametrize(
    ("size", "rank", "phase", "schedule"),
    [
        ((2, 2), 2, "forward", "1f1b"),
        *(
            pytest.param((2, 2), rank, phase, "gpipe", marks=MATRIX)
            for rank, phase in zip((0, 1, 2, 3, 1), PHASES, strict=True)
        ),
        *(
            pytest.param((4, 2), rank, phase, "1f1b", marks=MATRIX)
            for rank, phase in zip((7, 0, 3, 4, 5), PHASES, strict=True)
        ),
        *(
            pytest.param((2, 2), 2, "backward", schedule, marks=MATRIX)
            for schedule in ("interleaved1f1b", "interleavedzerobubble", "zbv", "dualpipev")
        ),
    ],
)
def test_another_pipeline_computes_the_lost_stage(
    size: tuple[int, int], rank: int, phase: str, schedule: str, twins: Twins, tmp_path: Path
) -> None:
    words = [*shape(*size), "--strategy", "shrink", "--schedule", schedule, *kills(spec(rank, phase))]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    (share,) = exact(report, [rank])["batches_computed_for"]
    assert (share["rank"], share["by"] // size[1]) == (rank, rank // size[1])
    assert share["steps"] == STEPS - report["recoveries"][0]["target_version"]


CELLS = ["--stages", "2", "--replicas", "2", "--tensor-parallel", "2", "--strategy", "shrink"]


@MATRIX  # in the default suite it comes back (the next test)
@pytest.mark.parametrize(
    ("rank", "phase"), [(7, "backward"), (0, "forward"), (3, "reduce"), (5, "optimizer"), (6, "idle")]
)
def test_counterparts_compute_for_a_cell_that_lacks_a_rank(
    rank: int, phase: str, twins: Twins, tmp_path: Path
) -> None:
    """The other rank of the cell keeps its process, and computes nothing."""
    report = passed(drill(*CELLS, *kills(spec(rank, phase)), twins=twins, at=tmp_path))
    cell = [rank - rank % 2, rank - rank % 2 + 1]
    shares = exact(report, cell)["batches_computed_for"]
    assert [share["rank"] for share in shares] == cell
    assert {(share["by"] // 4, share["by"] % 2) for share in shares} == {
        (lost // 4, lost % 2) for lost in cell
    }


def test_a_cell_comes_back_when_it_is_whole(twins: Twins, tmp_path: Path) -> None:
    words = [*CELLS, "--grow", "step=9", *kills(spec(2, "optimizer"))]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    assert exact(report, [2, 3], [])["returned"] == {"2": 10, "3": 10}
    assert report["sources"] == {"2": [0], "3": [1]}
    assert report["survivors_kept"] is True


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        (2, "backward"),
        *(
            pytest.param(rank, phase, marks=MATRIX)
            for rank, phase in ((0, "forward"), (3, "optimizer"), (1, "idle"))
        ),
    ],
)
def test_a_stage_that_nobody_else_has_moves(rank: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    words = [*shape(4, 1), "--strategy", "shrink", *kills(spec(rank, phase))]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    assert report["exact"] is True
    assert report["shrink"]["moved"] == {str(rank): 1 if rank == 0 else 0}


@pytest.mark.parametrize(("replicas", "phase"), [(2, "backward"), pytest.param(4, "optimizer", marks=MATRIX)])
def test_a_lost_rank_comes_back(replicas: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    words = shrink(replicas, "--grow", "step=9")
    report = passed(drill(*words, *kills(spec(1, phase)), twins=twins, at=tmp_path))
    shown = exact(report, [1], [])
    assert shown["returned"] == {"1": 10}
    assert report["sources"] == {"1": [rank for rank in range(replicas) if rank != 1]}


@MATRIX
def test_two_are_lost_and_both_come_back(twins: Twins, tmp_path: Path) -> None:
    specs = [spec(2, "backward", 4), spec(0, "reduce", 7)]
    report = passed(drill(*shrink(4, "--grow", "step=9"), *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    assert report["shrink"]["returned"] == {"0": 10, "2": 10}
    assert report["shrink"]["compared_at_end"] == [0, 1, 2, 3]
