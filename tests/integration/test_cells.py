"""Stages of several ranks (trainers/cells.py): tensor parallel, sharded, with replicas; killed, compared with twins."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.integration import trainer_world
from tests.integration.forked import Forks
from tests.integration.trainer_world import Run, run_trainer, undisturbed

pytestmark = pytest.mark.timeout(400)

STEPS = 8
Shape = tuple[int, int, int, int]
"""(pipeline, replicas, shards, tensor)"""
Twin = Callable[[Shape, str], Run]


def size_of(shape: Shape) -> int:
    pipeline, replicas, shards, tensor = shape
    return pipeline * replicas * shards * tensor


def run(directory: Path, shape: Shape, mesh: str, faults: list[dict[str, Any]]) -> Run:
    return run_trainer(directory, "cells.py", STEPS, *shape[1:], mesh, ranks=size_of(shape), faults=faults)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Twin:
    """The failure-free run of a shape; each is run once."""

    @cache
    def of(shape: Shape, mesh: str) -> Run:
        words = (STEPS, *shape[1:], mesh)
        return undisturbed(forks, tmp_path_factory.mktemp("twin"), "cells.py", *words, ranks=size_of(shape))

    return of


def kill(rank: int, phase: str, step: int = 6, microbatch: int = 1) -> dict[str, Any]:
    return {"rank": rank, "phase": phase, "step": step, "microbatch": microbatch}


def survived(faulted: Run, twin: Run, ranks: int, victims: list[int]) -> list[dict[int, str]]:
    """The strategies by rank of every plan."""
    plans = trainer_world.survived(faulted, twin, ranks, STEPS, victims)
    return [{entry["rank"]: entry["strategy"] for entry in plan} for plan in plans]


def test_a_tensor_parallel_stage_without_a_replica_is_replayed_whole(twin: Twin, tmp_path: Path) -> None:
    """Both ranks of the lost one's stage compute again, with live collectives between them; the others keep all."""
    shape = (2, 1, 1, 2)
    (plan,) = survived(run(tmp_path, shape, "own", [kill(1, "forward")]), twin(shape, "own"), 4, [1])
    assert plan == {0: "REPLAY", 1: "REPLAY", 2: "KEEP", 3: "KEEP"}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Callable[[str], Run]:
    """The failure-free runs of trainers/inside.py."""
    return cache(
        lambda how: undisturbed(forks, tmp_path_factory.mktemp("calm"), "inside.py", STEPS, how, ranks=4)
    )


@pytest.mark.parametrize(
    ("how", "phase"),
    [
        ("experts", "backward"),
        ("context", "forward"),
        *(
            pytest.param(how, phase, marks=pytest.mark.matrix)
            for how, phases in (("experts", ("forward", "optimizer")), ("context", ("backward", "optimizer")))
            for phase in phases
        ),
    ],
)
def test_parallelism_by_hand_inside_of_a_stage(
    how: str, phase: str, calm: Callable[[str], Run], tmp_path: Path
) -> None:
    """Experts by all-to-all, and attention over parts of sequences, in groups made by `dist.split_group`."""
    faults = [kill(1, phase)]
    faulted = run_trainer(tmp_path, "inside.py", STEPS, how, ranks=4, faults=faults)
    (plan,) = survived(faulted, calm(how), 4, [1])
    assert plan == {0: "REPLAY", 1: "REPLAY", 2: "KEEP", 3: "KEEP"}


def test_a_rank_with_a_replica_copies_from_its_counterpart(twin: Twin, tmp_path: Path) -> None:
    shape = (1, 2, 1, 2)
    faulted = run(tmp_path, shape, "session", [kill(3, "backward", microbatch=0)])
    (plan,) = survived(faulted, twin(shape, "session"), 4, [3])
    assert plan.pop(3) == "REPLICA"
    assert set(plan.values()) == {"KEEP"}
    (event,) = (e for e in faulted["events"] if e["event"] == "plan")
    assert [e["sources"] for e in event["ranks"] if e["rank"] == 3] == [[1]]


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 2), pytest.param((1, 1, 2, 2), marks=pytest.mark.matrix)], ids=str
)
def test_a_rehearsal_needs_none_of_the_others(shape: Shape, tmp_path: Path) -> None:
    """What the ranks of its stage have given one another in the recorded steps is answered from the recording."""
    found = run_trainer(
        tmp_path,
        "cells.py",
        STEPS,
        *shape[1:],
        "own",
        "rehearsed",
        ranks=4,
        faults=[],
        spares=1,
        launcher_flags=("--rehearse", "start"),
    )
    # The trainer waits for those of version 0; one of version 5 may still be under way when the job has ended.
    ends = [e for e in found["events"] if e["event"] == "rehearsal_end" and not e["passing"]]
    assert {e["rank"] for e in ends if e["version"] == 0} == set(range(4))
    assert [(e["why_not"], e["difference"]) for e in ends] == [("", "")] * len(ends)


SHAPES: list[Shape] = [(2, 1, 1, 2), (2, 2, 1, 2), (2, 1, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2), (4, 1, 1, 2)]
PHASES = ("forward", "backward", "reduce", "optimizer")


@pytest.mark.matrix
@pytest.mark.timeout(500)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_any_kill_is_survived(shape: Shape, phase: str, twin: Twin, tmp_path: Path) -> None:
    """A rank is lost early, and another one later; over meshes of the trainer's own."""
    last = size_of(shape) - 1
    faults = [kill(last, phase, step=2), kill(1, phase, step=6)]
    survived(run(tmp_path, shape, "own", faults), twin(shape, "own"), last + 1, [last, 1])


@pytest.mark.matrix
@pytest.mark.timeout(500)
@pytest.mark.parametrize("phase", PHASES[:3])
@pytest.mark.parametrize("shape", [(2, 1, 1, 2), (2, 1, 2, 1)], ids=lambda shape: "x".join(map(str, shape)))
def test_a_stage_that_is_lost_whole_is_replayed(shape: Shape, phase: str, twin: Twin, tmp_path: Path) -> None:
    stage = shape[2] * shape[3]
    faults = [{**kill(rank, phase), "hold": True} for rank in range(stage)]
    (plan,) = survived(run(tmp_path, shape, "session", faults), twin(shape, "session"), 4, list(range(stage)))
    assert {plan[rank] for rank in range(stage)} == {"REPLAY"}
    assert {plan[rank] for rank in range(stage, 4)} <= {"KEEP"}
