"""Drills of pipelines whose ranks share a lost one's microbatches: a transformer with dropout, clipping and AdamW.

Every step that is compared has the bits of the failure-free run, under all of torch's schedules."""

from pathlib import Path

import pytest

from swift_ft.lab.drill.topology import SPLITTING
from tests.integration.drill_world import Twins, drill, kills, passed
from tests.integration.drill_world import shape as shape_of
from tests.integration.test_drill_shrink import exact, spec

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
SCHEDULES = ("1f1b", "gpipe", "interleaved1f1b", "interleavedzerobubble", "zbv", "dualpipev")


def words(stages: int, replicas: int, *more: str) -> list[str]:
    return [*shape_of(stages, replicas), "--strategy", "adaptive", *more]


@MATRIX  # one in the default suite: `test_adaptive.py`
@pytest.mark.parametrize(
    ("shape", "schedule", "lost"),
    [
        # No pipeline is whole after the second one.
        ((2, 2), "interleavedzerobubble", {0: 6, 3: 9}),
        ((2, 3), "1f1b", {4: 6}),
        *(
            (shape, schedule, lost)
            for schedule in SCHEDULES
            for shape, lost in (((2, 2), {1: 6}), ((2, 2), {0: 5, 3: 8}), ((2, 3), {2: 6}))
        ),
        # Of one stage, of neighbouring stages, of three stages.
        ((4, 2), "1f1b", {2: 5, 5: 7}),
        ((4, 3), "1f1b", {0: 5, 1: 7, 5: 9}),
        ((4, 3), "1f1b", {3: 5, 6: 5, 9: 8}),
        ((2, 4), "1f1b", {5: 5, 6: 7, 0: 9}),
    ],
)
def test_the_peers_of_lost_ranks_share_their_microbatches(
    shape: tuple[int, int], schedule: str, lost: dict[int, int], twins: Twins, tmp_path: Path
) -> None:
    # The first one while gradients of weights are computed apart, where the schedule does that.
    phases = ["weights" if schedule in SPLITTING else "backward", *["backward"] * len(lost)]
    faults = kills(
        *(spec(rank, phase, step) for phase, (rank, step) in zip(phases, lost.items(), strict=False))
    )
    report = passed(drill(*words(*shape, "--schedule", schedule), *faults, twins=twins, at=tmp_path))
    at_once = len(set(lost.values())) < len(lost)
    assert report["exact"] is True
    assert report["shrink"]["vacant_after"][-1] == sorted(lost)
    assert at_once or len(report["recoveries"]) == len(lost)


@pytest.mark.parametrize(
    ("replicas", "lost", "phases"),
    [
        (2, {7: 6}, ["backward"]),
        pytest.param(2, {0: 5, 7: 8}, ["forward", "optimizer"], marks=MATRIX),  # no pipeline is whole
        pytest.param(3, {11: 5, 0: 8}, ["reduce", "idle"], marks=MATRIX),
    ],
)
def test_the_peers_of_a_cell_share_its_microbatches(
    replicas: int, lost: dict[int, int], phases: list[str], twins: Twins, tmp_path: Path
) -> None:
    faults = kills(
        *(spec(rank, phase, step) for phase, (rank, step) in zip(phases, lost.items(), strict=True))
    )
    shape = words(2, replicas, "--tensor-parallel", "2")
    report = passed(drill(*shape, *faults, twins=twins, at=tmp_path))
    vacant = sorted(slot for rank in lost for slot in (rank - rank % 2, rank - rank % 2 + 1))
    assert report["exact"] is True
    assert report["shrink"]["vacant_after"][-1] == vacant
    shares = {(share["rank"], share["by"] % 2) for share in report["shrink"]["batches_computed_for"]}
    assert shares == {(slot, slot % 2) for slot in vacant}, "each of them has its counterparts' microbatches"


@MATRIX  # in the default suite: `test_staggered.py`
@pytest.mark.parametrize(
    ("shape", "schedule", "lost", "phase"),
    [
        # From step 18 on norms do not clip any more.
        ((2, 2), "1f1b", {3: 23}, "reduce"),
        *(
            ((2, 2), schedule, {0: 21, 3: 25}, phase)
            for schedule, phase in zip(
                SCHEDULES, ("forward", "backward", "reduce", "optimizer") * 2, strict=False
            )
        ),
        ((4, 2), "1f1b", {6: 22, 1: 24}, "backward"),
        ((2, 3), "1f1b", {2: 22, 1: 24}, "optimizer"),
    ],
)
def test_staggered_steps(
    shape: tuple[int, int], schedule: str, lost: dict[int, int], phase: str, twins: Twins, tmp_path: Path
) -> None:
    asked = words(
        *shape, "--schedule", schedule, "--staggered", "on", "--adaptive-memory", "2", "--steps", "30"
    )
    faults = kills(*(spec(rank, phase, step) for rank, step in lost.items()))
    outcome = drill(*asked, *faults, twins=twins, at=tmp_path)
    report = passed(outcome)
    assert report["exact"] is True
    assert report["steps_lost"] == 0


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["1", "2"])
def test_auto_reroutes_if_no_process_comes(memory: str, twins: Twins, tmp_path: Path) -> None:
    asked = ["--stages", "2", "--replicas", "2", "--lost-shard", "quickest", "--adaptive-memory", memory]
    report = passed(drill(*asked, *kills(spec(3, "forward")), twins=twins, at=tmp_path))
    exact(report, [3])


@pytest.mark.matrix
def test_gradients_that_are_not_kept_apart_are_named(twins: Twins, tmp_path: Path) -> None:
    asked = words(2, 2, "--exact-gradients", "off", "--allow-inexact")
    outcome = drill(*asked, *kills(spec(1, "backward")), twins=twins, at=tmp_path)
    report = outcome.report
    assert report is not None
    assert (report["verdict"], report["exact"]) == ("PASS", False), outcome.explain()
    assert report["not_exact"]
    for named in report["not_exact"]:
        assert named.endswith("gradients of a lost rank's microbatches were added to other ranks' own")
    assert "no bits are promised" in report["reason"]
