"""Data parallelism without a pipeline survives a loss bit for bit, without replaying: trainers/replicated.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.forked import Forks
from tests.integration.trainer_world import Run, run_trainer, undisturbed

STEPS = 8


def run(directory: Path, mode: str, faults: list[dict[str, Any]], code_wanted: int = 0) -> Run:
    return run_trainer(
        directory, "replicated.py", mode, STEPS, ranks=2, faults=faults, code_wanted=code_wanted
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("plain", {"rank": 1, "step": 5, "phase": "optimizer"}),
        pytest.param("ddp", {"rank": 0, "step": 4, "phase": "reduce"}, marks=pytest.mark.matrix),
        pytest.param(
            "wait_free", {"rank": 1, "step": 4, "phase": "update", "beside": [0]}, marks=pytest.mark.matrix
        ),
    ],
)
def test_a_replica_gives_its_state(mode: str, fault: dict[str, Any], forks: Forks, tmp_path: Path) -> None:
    twin = undisturbed(forks, tmp_path / "twin", "replicated.py", mode, STEPS, ranks=2)
    faulted = run(tmp_path / "faulted", mode, [{"id": "f0", **fault}])
    trace = faulted["events"]
    assert [e["event"] for e in trace].count("fault") == 1
    plan = next(e for e in trace if e["event"] == "plan")
    victim = fault["rank"]
    ways = {entry["rank"]: entry["strategy"] for entry in plan["ranks"]}
    assert ways[victim] == "REPLICA"
    assert ways[1 - victim] in (("UNDO",) if mode == "wait_free" else ("KEEP", "ROLL_FORWARD"))
    assert not [e for e in trace if e["event"] == "replay_end"]
    assert len([name for name in faulted["digests"] if "-g" in name]) == 2
    assert {f"rank{rank}-v{STEPS}.json" for rank in range(2)} <= set(faulted["digests"])
    for name, digests in faulted["digests"].items():  # of every version, and at the recovery
        assert digests == twin["digests"][name.removesuffix(".json").split("-g")[0] + ".json"], name
    pids = {e["pid"] for e in trace if e["event"] == "step_end" and e["rank"] == 1 - victim}
    assert len(pids) == 1


@pytest.mark.timeout(240)
def test_who_is_whole_and_who_takes_its_step_back_give_the_state_together(
    forks: Forks, tmp_path: Path
) -> None:
    """In the first step: what an optimizer makes in it is gone again, or the two would not be alike."""
    twin = undisturbed(forks, tmp_path / "twin", "replicated.py", "wait_free", STEPS, ranks=3)
    faulted = run_trainer(
        tmp_path / "faulted", "replicated.py", "halves", STEPS, ranks=3, faults=[], spares=1
    )
    (plan,) = [e for e in faulted["events"] if e["event"] == "plan"]
    ways = {entry["rank"]: entry["strategy"] for entry in plan["ranks"]}
    assert ways == {0: "KEEP", 1: "REPLICA", 2: "UNDO"}
    assert plan["ranks"][1]["sources"] == [0, 2]
    (undone,) = [e for e in faulted["events"] if e["event"] == "undone"]
    assert undone["buckets"] == 1
    assert len([name for name in faulted["digests"] if "-g" in name]) == 3
    for name, digests in faulted["digests"].items():
        assert digests == twin["digests"][name.removesuffix(".json").split("-g")[0] + ".json"], name


@pytest.mark.timeout(120)
def test_ranks_that_are_no_replicas_are_told_so_after_the_first_step(tmp_path: Path) -> None:
    output = run(tmp_path, "statistics", [], code_wanted=2)["output"]
    assert "these ranks are no replicas" in output
    assert "a buffer of this rank is not the same" in output
