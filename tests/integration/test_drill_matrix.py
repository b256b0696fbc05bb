"""The long matrix: every schedule, victim and phase, each kill in a run of its own. ``scripts/test -m matrix``."""

from pathlib import Path

import pytest

from tests.integration.drill_world import Twins, drill, kills, passed

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(300)]

SCHEDULES = ["1f1b", "gpipe", "interleaved1f1b", "interleavedzerobubble", "zbv", "dualpipev"]
MICROBATCHES = {"dualpipev": "8"}


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "idle"])
@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_kill(schedule: str, rank: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    where = ",microbatch=2" if phase in ("forward", "backward") else ""
    report = passed(
        drill(
            "--schedule",
            schedule,
            "--microbatches",
            MICROBATCHES.get(schedule, "4"),
            *kills(f"rank={rank},step=8{where},phase={phase}"),
            twins=twins,
            at=tmp_path,
        )
    )
    assert report["exact"] is True


@pytest.mark.parametrize(("rank", "stream"), [(0, "s1.B"), (2, "s3.B"), (3, "s2.F")])
def test_any_corrupt_stream_is_noticed(rank: int, stream: str, twins: Twins, tmp_path: Path) -> None:
    specs = [f"rank={rank},step=8", f"corrupt=log,step=8,stream={stream}"]
    report = passed(drill(*kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is False
    assert stream in report["reason"]


SHAPES = [(2, 1, 1, 2), (2, 2, 1, 2), (2, 1, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2), (4, 1, 1, 2)]
"""(pipeline, replicas, shards, tensor)"""


PHASES = [
    (shape, phase)
    for shape in SHAPES
    for phase in ("forward", "backward", "reduce", "optimizer")
    if phase != "reduce" or shape[1] * shape[2] > 1  # else no data-parallel ranks reduce anything
]


@pytest.mark.parametrize(
    ("shape", "phase"), PHASES, ids=lambda each: each if isinstance(each, str) else "x".join(map(str, each))
)
def test_stages_of_several_ranks(
    shape: tuple[int, int, int, int], phase: str, twins: Twins, tmp_path: Path
) -> None:
    pipeline, replicas, shards, tensor = shape
    sizes = {"stages": pipeline, "replicas": replicas, "shards": shards, "tensor-parallel": tensor}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    where = ",microbatch=2" if phase in ("forward", "backward") else ""
    last = pipeline * replicas * shards * tensor - 1
    report = passed(
        drill(*words, *kills(f"rank={last},step=8{where},phase={phase}"), twins=twins, at=tmp_path)
    )
    assert report["exact"] is True
    ways = {int(rank): each["strategy"] for rank, each in report["recoveries"][0]["ranks"].items()}
    replayed = range(last + 1 - shards * tensor, last + 1) if replicas == 1 else ()
    assert [rank for rank, way in ways.items() if way == "replay"] == list(replayed)
