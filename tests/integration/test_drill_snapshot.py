"""Drills of strategies by which all ranks go back, and end with the same bits: "snapshot", to copies in host memory;
"reinit", to the beginning of their script, in place."""

import re
from pathlib import Path

import pytest

from tests.integration.drill_world import KILL_STEP, PHASES, Twins, drill, exact, kills, passed, shape, spec

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
EVERY, STEP = 3, KILL_STEP
SHAPES = ((1, 2), (1, 4), (2, 2), (4, 2))
SHOWN = [(1, 2, "reduce")]


def snapshot(stages: int, replicas: int, *words: str) -> list[str]:
    return [*shape(stages, replicas), "--strategy", "snapshot", "--snapshot-every", str(EVERY), *words]


@pytest.mark.parametrize(
    ("stages", "replicas", "phase"),
    [
        *SHOWN,
        *(
            pytest.param(stages, replicas, phase, marks=MATRIX)
            for stages, replicas in SHAPES
            for phase in PHASES
            if (stages, replicas, phase) not in SHOWN
        ),
    ],
)
def test_all_go_back_to_the_newest_one(
    stages: int, replicas: int, phase: str, twins: Twins, tmp_path: Path
) -> None:
    words = snapshot(stages, replicas)
    report = exact(drill(*words, *kills(spec(1, phase)), twins=twins, at=tmp_path), STEP // EVERY * EVERY)
    assert set(report["strategy"].values()) == {"snapshot"}
    assert report["steps_lost"] <= EVERY + 1
    shown = report["snapshot"]
    sources = {entry["rank"]: entry["source"] for entry in shown["restored"]}
    assert sources.pop(1) in report["snapshot"]["partners"]["1"]
    assert all(source == rank for rank, source in sources.items())


def test_auto_goes_back_to_one_where_a_replay_takes_longer(twins: Twins, tmp_path: Path) -> None:
    """Two steps, and a replay of a hundred and ten: so many that every rank has told what it has measured, as it does
    every two seconds."""
    words = ["--stages", "2", "--replicas", "1", "--steps", "114", "--checkpoint-every", "200"]
    words += ["--snapshot-every", "3", *kills(spec(1, "backward", 110))]
    report = exact(drill(*words, twins=twins, at=tmp_path), 108)
    assert set(report["strategy"].values()) == {"snapshot"}
    assert re.search(r"2 steps again take [0-9.]+ s, and a replay [0-9.]+ s", str(report["recoveries"]))


@pytest.mark.matrix
def test_while_the_copies_pass_from_rank_to_rank_the_older_ones_stand(twins: Twins, tmp_path: Path) -> None:
    outcome = drill(*snapshot(2, 1), *kills("rank=1,step=3,phase=snapshot"), twins=twins, at=tmp_path)
    exact(outcome, 0)


@MATRIX
def test_the_keeper_right_after_the_rank_that_it_keeps_for(twins: Twins, tmp_path: Path) -> None:
    """A generation begins with a snapshot: whoever is new holds no copies."""
    specs = [spec(0, "backward", 7), spec(1, "backward", 8)]
    exact(drill(*snapshot(2, 1), *kills(*specs), twins=twins, at=tmp_path), 6, 6)


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_another_one_while_they_go_back(rank: int, twins: Twins, tmp_path: Path) -> None:
    """Rank 1's copy is sent by rank 2, or by the one that has it from there."""
    keeper = 2 if rank == 0 else 1
    specs = [spec(1, "backward"), f"rank={keeper},phase=copy"]
    report = passed(drill(*snapshot(2, 2), *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    (recovery,) = report["recoveries"]
    assert recovery["plans"] == 2


def test_a_rank_and_its_keeper_at_once_the_checkpoint_stands_behind(twins: Twins, tmp_path: Path) -> None:
    specs = [spec(1, "idle"), spec(2, "idle")]
    report = passed(drill(*snapshot(4, 1), *kills(*specs), twins=twins, at=tmp_path))
    assert set(report["strategy"].values()) == {"checkpoint"}
    assert "no snapshot of rank 1 is left" in report["reason"]
    assert report["recoveries"][0]["target_version"] in (0, 5), "it is saved beside training"
    assert report["exact"] is True


@MATRIX
def test_a_bit_that_flips_on_the_way_is_noticed_and_the_checkpoint_stands_behind(
    twins: Twins, tmp_path: Path
) -> None:
    report = passed(
        drill(*snapshot(2, 1), *kills(spec(1, "backward"), "corrupt=copy,rank=1"), twins=twins, at=tmp_path)
    )
    assert set(report["strategy"].values()) == {"checkpoint"}


@pytest.mark.parametrize(
    ("stages", "replicas", "phase"),
    [
        (2, 2, "backward"),
        *(
            pytest.param(stages, replicas, phase, marks=MATRIX)
            for stages, replicas in SHAPES
            for phase in PHASES
            if (stages, replicas, phase) != (2, 2, "backward")
        ),
    ],
)
def test_all_begin_again(stages: int, replicas: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    every = 5
    words = [*shape(stages, replicas), "--strategy", "reinit", "--checkpoint-every", str(every)]
    report = exact(drill(*words, *kills(spec(1, phase)), twins=twins, at=tmp_path), every)
    again = {entry["rank"] for entry in report["reinit"]["begun_again"]}
    assert again >= set(range(stages * replicas)) - {1}
