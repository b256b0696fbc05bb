"""The long matrix of data parallelism: each kill in a run of its own; convergence. ``scripts/test -m matrix``."""

from pathlib import Path

import pytest

from tests.integration.drill_world import Twins, drill, kills, passed, shape

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

SHAPES = [(1, 2), (1, 4), (2, 2), (4, 2)]
OPTIMIZERS = ["adamw", "sgd", "amsgrad"]
MODES = {
    "after_backward": ([], ["backward", "reduce", "optimizer"]),
    "wait_free": (["--updates", "wait_free"], ["backward", "reduce", "update", "optimizer"]),
    "ddp": (["--data-parallel", "ddp"], ["backward", "reduce", "optimizer"]),
}
STEP = 8

CASES = [
    pytest.param(
        stages,
        replicas,
        schedule,
        mode,
        optimizer,
        phase,
        id=f"{stages}x{replicas}-{schedule}-{mode}-{optimizer}-{phase}",
    )
    for stages, replicas in SHAPES
    for schedule in ("1f1b", "interleavedzerobubble")
    for mode, (_, phases) in MODES.items()
    for optimizer in OPTIMIZERS
    for phase in phases
    if schedule == "1f1b" or (stages > 1 and mode != "ddp")
]


@pytest.mark.parametrize(("stages", "replicas", "schedule", "mode", "optimizer", "phase"), CASES)
def test_one_kill(
    stages: int,
    replicas: int,
    schedule: str,
    mode: str,
    optimizer: str,
    phase: str,
    twins: Twins,
    tmp_path: Path,
) -> None:
    # Another victim for each phase, so that all places of the mesh have their turn.
    rank = (3 * ["backward", "reduce", "update", "optimizer"].index(phase) + 1) % (stages * replicas)
    where = ",microbatch=3" if phase == "backward" else ""
    words = [*shape(stages, replicas), "--schedule", schedule]
    words += [*MODES[mode][0], "--optimizer", optimizer]
    spec = f"rank={rank},step={STEP}{where},phase={phase}"
    report = passed(drill(*words, *kills(spec), twins=twins, at=tmp_path))
    assert report["exact"] is True
    assert report["steps_replayed"] == 0
    assert "replica" in report["strategy"].values()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("undo", ["exact", "arithmetic"])
def test_three_hundred_steps_and_five_kills(undo: str, optimizer: str, twins: Twins, tmp_path: Path) -> None:
    words = ["--stages", "2", "--replicas", "2", "--updates", "wait_free", "--undo", undo]
    words += ["--optimizer", optimizer, "--steps", "300", "--checkpoint-every", "50", "--spares", "2"]
    specs = (
        "rank=1,step=37,phase=backward,microbatch=3",
        "rank=2,step=88,phase=update",
        "rank=0,step=141,phase=idle",
    )
    specs += ("rank=3,step=190,phase=reduce", "rank=1,step=266,phase=update")
    outcome = drill(*words, *kills(*specs), twins=twins, at=tmp_path)
    assert outcome.report is not None, outcome.explain()
    assert outcome.report["undo"]["mode"] == undo, "no kill has left an update half-applied"
    if undo == "exact":
        report = passed(outcome)
        assert report["exact"] is True
        assert report["loss"]["recovered"] == report["loss"]["failure_free"]
        return
    report = outcome.report
    assert report["verdict"] == "PASS", outcome.explain()
    assert report["exact"] is False
    assert len(report["loss"]["steps"]) == 300
    assert report["loss"]["largest_relative_difference"] <= report["loss"]["tolerance"]
    assert max(report["loss"]["failure_free"][-30:]) < 0.8 * report["loss"]["failure_free"][0], "it learns"
