"""Replicas of a pipeline that go on without a rank, and with it again (trainers/shrinking_pipeline.py): real processes,
real SIGKILL. What the bits must be is computed by plain torch in one process, which knows nothing of the session.
"""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.forked import shared
from tests.integration.test_shrink import named, pids, shrinking
from tests.integration.trainer_world import TRAINERS, Run, run_trainer

pytestmark = pytest.mark.timeout(300)

STEPS = 12
MATRIX = pytest.mark.matrix
TRAINER = "shrinking_pipeline.py"


def run(
    directory: Path,
    shape: tuple[int, int],
    faults: list[dict[str, Any]],
    habit: str = "asks",
    max_restarts: int = 0,
    code_wanted: int = 0,
    strategy: str = "shrink",
    steps: int = STEPS,
    flags: Sequence[str] = (),
) -> Run:
    """`shape`: stages, replicas."""
    stages, replicas = shape
    return run_trainer(
        directory / "job",
        TRAINER,
        "session",
        steps,
        stages,
        replicas,
        habit,
        ranks=stages * replicas,
        faults=faults,
        code_wanted=code_wanted,
        settings=shrinking("redistribute", max_restarts, strategy),
        launcher_flags=flags,
    )


@functools.cache
def reference(steps: int, stages: int, replicas: int, habit: str) -> dict[str, dict[str, str]]:
    """Stage -> step -> digest, by plain torch."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "reference.json")
        made = shared().run(TRAINERS / TRAINER, ["reference", steps, stages, replicas, out, habit], {})
        assert made.wait(240.0) == 0
        bits: dict[str, dict[str, str]] = json.loads(out.read_text())
        return bits


def check_bits(
    outcome: Run,
    shape: tuple[int, int],
    lost: set[int],
    habit: str = "asks",
    *,
    exact: bool = True,
    steps: int = STEPS,
) -> None:
    """Of every rank that is there at the end, in every step that its last process has done."""
    stages, replicas = shape
    wanted = reference(steps, stages, replicas, habit)
    for rank in set(range(stages * replicas)) - lost:
        bits = outcome["digests"][f"bits-{rank}.json"]
        assert str(steps - 1) in bits
        assert bits.items() <= wanted[str(rank // replicas)].items(), f"rank {rank}"
    assert bool(named(outcome, "not_exact")) is not exact


def check_one_step_at_most(outcome: Run) -> None:
    """No loss has sent anybody back to a checkpoint."""
    for plan in named(outcome, "plan"):
        used = {each["strategy"] for each in plan["ranks"]}
        assert used <= {"KEEP", "UNDO", "ROLL_FORWARD", "REPLICA"}, "one step is lost at most"


def lose_several(
    shape: tuple[int, int], faults: list[dict[str, Any]], directory: Path, strategy: str, habit: str = "asks"
) -> Run:
    """One after the other, or at once; nobody comes back."""
    outcome = run(directory, shape, faults, habit, strategy=strategy)
    lost = {fault["rank"] for fault in faults}
    assert {e["rank"] for e in named(outcome, "left_vacant")} == lost
    check_bits(outcome, shape, lost, habit)
    return outcome


def lose_and_return(shape: tuple[int, int], lost: int, phase: str, directory: Path, strategy: str) -> Run:
    """Another process comes for the lost rank while the others train."""
    fault = {"rank": lost, "step": 5, "phase": phase, "microbatch": 1}
    outcome = run(directory, shape, [fault], "waits", max_restarts=1, strategy=strategy)
    assert [e["rank"] for e in named(outcome, "left_vacant")] == [lost]
    assert len(pids(outcome, lost)) == 2
    check_bits(outcome, shape, set())
    return outcome


@pytest.mark.parametrize(
    ("shape", "lost", "phase", "habit"),
    [
        ((2, 2), 2, "reduce", "sums"),
        *(
            pytest.param((4, 2), lost, phase, "sums", marks=MATRIX)
            for lost, phase in ((0, "forward"), (3, "backward"), (5, "reduce"), (6, "idle"), (7, "optimizer"))
        ),
        pytest.param((2, 3), 4, "reduce", "sums", marks=MATRIX),
    ],
)
def test_another_rank_of_its_stage_sits_in_its_place(
    shape: tuple[int, int], lost: int, phase: str, habit: str, tmp_path: Path
) -> None:
    fault = {"rank": lost, "step": 5, "phase": phase, "microbatch": 1}
    outcome = run(tmp_path, shape, [fault], habit)

    assert [e["rank"] for e in named(outcome, "left_vacant")] == [lost]
    stages, replicas = shape
    stage, origin = divmod(lost, replicas)
    adopter = stage * replicas + min({0, 1} - {origin})
    assert {(e["rank"], e["origin"]) for e in named(outcome, "adopted_step")} == {(adopter, origin)}
    for rank in set(range(stages * replicas)) - {lost}:
        assert len(pids(outcome, rank)) == 1, "survivors keep their processes"
    check_bits(outcome, shape, {lost})


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("shape", "faults"),
    [
        # The second loss is in an adopted pass of the other's stage, or behind it.
        (
            (2, 3),
            [
                {"rank": 3, "step": 4, "phase": "reduce"},
                {"rank": 2, "step": 7, "phase": "forward", "microbatch": 2},
            ],
        ),
        ((4, 2), [{"rank": 2, "step": 4, "phase": "reduce"}, {"rank": 6, "step": 4, "phase": "reduce"}]),
        (
            (4, 2),
            [{"rank": 7, "step": 3, "phase": "optimizer"}, {"rank": 3, "step": 6, "phase": "optimizer"}],
        ),
    ],
)
def test_two_losses(shape: tuple[int, int], faults: list[dict[str, Any]], tmp_path: Path) -> None:
    lose_several(shape, faults, tmp_path, "shrink", "sums")


@pytest.mark.parametrize(
    ("shape", "lost", "phase"),
    [
        ((2, 2), 1, "optimizer"),
        pytest.param((2, 2), 3, "backward", marks=MATRIX),
        pytest.param((4, 2), 4, "reduce", marks=MATRIX),
    ],
)
def test_one_that_comes_back_makes_the_world_full_again(
    shape: tuple[int, int], lost: int, phase: str, tmp_path: Path
) -> None:
    lose_and_return(shape, lost, phase, tmp_path, "shrink")


@pytest.mark.matrix
def test_without_a_whole_pipeline_the_lost_rank_moves_beside_another(tmp_path: Path) -> None:
    """Rank 2 stays away; without rank 1 neither pipeline is whole, so that one goes on in another process. With its
    pipeline alone it has nobody to try out with whether it computes what others do, so the job says so."""
    faults = [{"rank": 2, "step": 4, "phase": "reduce"}, {"rank": 1, "step": 8, "phase": "idle"}]
    outcome = run(tmp_path, (2, 2), faults)
    assert [e["rank"] for e in named(outcome, "left_vacant")] == [2]
    (moved,) = named(outcome, "moved")
    assert (moved["rank"], moved["beside"]) == (1, 0)
    assert [len(pids(outcome, rank)) for rank in (0, 1, 3)] == [1, 2, 1]
    assert "nobody was left to try out" in named(outcome, "not_exact")[0]["reason"]
    check_bits(outcome, (2, 2), {2}, exact=False)


@pytest.mark.matrix
def test_a_schedule_behind_the_update_is_refused(tmp_path: Path) -> None:
    refused = run(tmp_path, (2, 2), [], "evaluates", code_wanted=2)
    assert "a schedule that is called behind the update" in refused["output"]
