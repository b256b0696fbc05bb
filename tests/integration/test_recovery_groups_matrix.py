"""Recovery groups, the long matrix: each kill in a run of its own. ``scripts/test -m matrix``."""

from pathlib import Path

import pytest

from tests.integration.drill_world import Twins, drill, kills, passed

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]

GROUPS = {"0-1,2-3": [(0, 1), (2, 3)], "0,1-2,3": [(0,), (1, 2), (3,)], "0-2,3": [(0, 1, 2), (3,)]}


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "idle"])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("groups", list(GROUPS))
def test_one_kill(groups: str, rank: int, phase: str, twins: Twins, tmp_path: Path) -> None:
    where = ",microbatch=2" if phase in ("forward", "backward") else ""
    words = ["--groups", groups, *kills(f"rank={rank},step=8{where},phase={phase}")]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    assert report["exact"] is True
    group = next(group for group in GROUPS[groups] if rank in group)
    done_again = {int(stage) for stage, name in report["strategy"].items() if name in ("replay", "catch_up")}
    assert {report["strategy"][str(stage)] for stage in group} == {"replay"}
    # Others may be a step behind: then a group goes back as a whole, where its ranks hold two versions.
    for other in GROUPS[groups]:
        assert done_again.issuperset(other) or done_again.isdisjoint(other)
    assert phase in ("optimizer", "idle") or done_again == set(group)


@pytest.mark.parametrize("rank", [1, 6])
def test_a_group_of_four_of_eight_stages(rank: int, twins: Twins, tmp_path: Path) -> None:
    words = ["--stages", "8", "--microbatches", "8", "--groups", "0-3,4-7"]
    report = passed(drill(*words, *kills(f"rank={rank},step=8,microbatch=2"), twins=twins, at=tmp_path))
    assert report["exact"] is True
    lost = {int(stage) for stage, name in report["strategy"].items() if name == "replay"}
    assert lost == set(range(4) if rank < 4 else range(4, 8))


def test_a_stage_with_a_replica_is_copied_and_its_group_keeps_its_state(twins: Twins, tmp_path: Path) -> None:
    words = ["--stages", "4", "--replicas", "2", "--groups", "0-1,2-3", *kills("rank=3,step=8,microbatch=2")]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    # Stage 1 alone has lost something; whom the loss caught in the vote finishes its step.
    assert {stage for stage, name in report["strategy"].items() if name == "replica"} == {"1"}
    assert set(report["strategy"].values()) <= {"keep", "roll_forward", "replica"}


def test_a_stage_without_one_takes_all_dp_ranks_of_its_group_along(twins: Twins, tmp_path: Path) -> None:
    specs = ["rank=2,step=8,microbatch=2,phase=forward", "rank=3,step=8,microbatch=2,phase=forward"]
    words = ["--stages", "4", "--replicas", "2", "--groups", "0-1,2-3", "--spares", "2", *kills(*specs)]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    assert report["exact"] is True
    lost = {stage for stage, name in report["strategy"].items() if name == "replay"}
    assert lost == {"0", "1"}


def test_one_group_of_all_with_replicas_copies(twins: Twins, tmp_path: Path) -> None:
    words = ["--stages", "2", "--replicas", "2", "--groups", "0-1", *kills("rank=3,step=8,microbatch=2")]
    outcome = drill(*words, twins=twins, at=tmp_path)
    assert outcome.exit_code == 0, outcome.explain()
    assert outcome.report is not None
    assert outcome.report["strategy"]["0"] in ("keep", "roll_forward")
    assert outcome.report["strategy"]["1"] == "replica"
    assert outcome.report["log"]["records"] == 0


def test_two_groups_are_hit_at_once_and_a_third_is_not(twins: Twins, tmp_path: Path) -> None:
    specs = ["rank=1,step=8,microbatch=2,phase=forward", "rank=2,step=8,microbatch=1,phase=forward"]
    words = ["--groups", "0-1,2,3", "--spares", "2"]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    (recovery,) = report["recoveries"]
    assert recovery["strategy"] == {"0": "replay", "1": "replay", "2": "replay", "3": "keep"}
    assert recovery["verified_sends"] > 0


def test_a_neighbour_of_the_group_dies_in_its_replay(twins: Twins, tmp_path: Path) -> None:
    specs = ["rank=1,step=8,microbatch=1", "rank=3,phase=replay"]
    words = ["--groups", "0-1,2-3", "--spares", "2", *kills(*specs)]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    assert report["exact"] is True


def test_the_log_server_is_down_when_a_group_replays(twins: Twins, tmp_path: Path) -> None:
    words = ["--groups", "0-1,2-3", *kills("service=logserver,step=8", "rank=0,step=8,microbatch=2")]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    assert report["exact"] is True


def test_a_recovery_takes_the_time_that_the_planner_predicts(twins: Twins, tmp_path: Path) -> None:
    """With stages that take a fixed time, as two cores do not hold four ranks. On a machine with nothing else to do."""
    shape = ["--model", "paced", "--steps", "13", "--checkpoint-every", "6"]
    words = [*shape, "--groups", "0,1-3", *kills("rank=2,step=11,microbatch=1")]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    (recovery,) = report["recoveries"]
    found = {replay["rank"]: replay for replay in recovery["replays"]}
    assert (sorted(found), {replay["steps"] for replay in found.values()}) == ([1, 2, 3], {5})
    # (M + w - 1) t, of stages that sleep for 30 ms and compute a little.
    assert all(5 * 6 * 0.03 < replay["seconds"] < 5 * 6 * 0.045 for replay in found.values())
