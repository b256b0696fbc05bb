"""Drills of the strategy "reinit": all ranks begin their script again in place, and end with the same bits."""

from pathlib import Path

import pytest

from tests.integration.drill_world import KILL_STEP, Twins, drill, exact, kills, spec

pytestmark = pytest.mark.timeout(300)

MATRIX = pytest.mark.matrix
EVERY, STEP = 5, KILL_STEP
SHAPES = ((1, 2), (1, 4), (2, 2), (4, 2))
PHASES = ("forward", "backward", "reduce", "optimizer", "idle")
SHOWN = [(2, 2, "backward")]


def reinit(stages: int, replicas: int, *words: str) -> list[str]:
    shape = ["--stages", str(stages), "--replicas", str(replicas)]
    return [*shape, "--strategy", "reinit", "--checkpoint-every", str(EVERY), *words]


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
def test_all_begin_again(stages: int, replicas: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    words = reinit(stages, replicas)
    report = exact(drill(*words, *kills(spec(1, phase)), twins=twins, at=tmp_path), EVERY)
    again = {entry["rank"] for entry in report["reinit"]["begun_again"]}
    assert again >= set(range(stages * replicas)) - {1}


@MATRIX
def test_while_a_wait_free_step_is_half_applied(twins: Twins, tmp_path: Path) -> None:
    words = reinit(2, 2, "--updates", "wait_free")
    exact(drill(*words, *kills(spec(1, "update")), twins=twins, at=tmp_path), EVERY)


@pytest.mark.matrix
def test_two_losses_one_after_the_other(twins: Twins, tmp_path: Path) -> None:
    words = reinit(1, 2)
    losses = kills(spec(1, "backward"), spec(0, "reduce", STEP + 1))
    exact(drill(*words, *losses, twins=twins, at=tmp_path), EVERY, EVERY)


@MATRIX
@pytest.mark.parametrize("ranks", [(0, 1), (1, 2)])
def test_two_at_once(ranks: tuple[int, int], twins: Twins, tmp_path: Path) -> None:
    words = reinit(2, 2)
    losses = kills(*(spec(rank, "backward") for rank in ranks))
    exact(drill(*words, *losses, twins=twins, at=tmp_path), EVERY)
