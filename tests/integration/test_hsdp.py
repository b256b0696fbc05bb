"""Sharded state survives: replicas of shards under FSDP2 (trainers/hsdp.py), killed, and compared with twins."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.device import simulated
from tests.integration import trainer_world
from tests.integration.forked import Forks
from tests.integration.trainer_world import Run, run_trainer, undisturbed

STEPS = 8
Twin = Callable[..., Run]


def run(
    directory: Path,
    replicas: int,
    shards: int,
    precision: str,
    faults: list[dict[str, Any]],
    device: str = "cpu",
) -> Run:
    return run_trainer(
        directory, "hsdp.py", STEPS, replicas, shards, precision, device, ranks=4, faults=faults
    )


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Twin:
    """The failure-free run of a shape; each is run once."""

    @cache
    def of(replicas: int, shards: int, precision: str, device: str = "cpu") -> Run:
        shape = (replicas, shards, precision, device)
        return undisturbed(forks, tmp_path_factory.mktemp("twin"), "hsdp.py", STEPS, *shape, ranks=4)

    return of


def kill(rank: int, phase: str, step: int = 5, microbatch: int = 1) -> dict[str, Any]:
    return {"rank": rank, "phase": phase, "step": step, "microbatch": microbatch}


def kill_together(*ranks: int, phase: str, step: int = 5) -> list[dict[str, Any]]:
    return [{**kill(rank, phase, step), "hold": True} for rank in ranks]


def survived(faulted: Run, twin: Run, victims: list[int]) -> list[list[dict[str, Any]]]:
    recovered = [name for name in faulted["digests"] if "-g" in name]
    assert {name.split("-")[0] for name in recovered} == {f"rank{rank}" for rank in range(4)}
    return trainer_world.survived(faulted, twin, 4, STEPS, victims)


def copied(plan: list[dict[str, Any]]) -> dict[int, list[int]]:
    """rank -> where it copies from; all others keep what they have, or finish the step in whose vote they were."""
    ways = {entry["strategy"] for entry in plan}
    assert {"REPLICA"} <= ways <= {"KEEP", "ROLL_FORWARD", "REPLICA"}
    return {entry["rank"]: entry["sources"] for entry in plan if entry["strategy"] == "REPLICA"}


@pytest.mark.timeout(400)
def test_a_shard_is_copied_from_its_replica_and_so_is_a_group_of_them(twin: Twin, tmp_path: Path) -> None:
    """One shard is lost in a reduction; later both of a replica, while gradients wait for theirs."""
    whole = twin(2, 2, "bf16")
    first = {rank: whole["digests"][f"rank{rank}-v0.json"]["parameters"] for rank in range(4)}
    # The trainer gives every rank other weights: replicas are made alike, shards stay their own.
    assert first[0] == first[2]
    assert first[1] == first[3]
    assert first[0] != first[1]
    faults = [kill(3, "reduce", step=2), *kill_together(2, 3, phase="backward")]
    one, *_, group = survived(run(tmp_path, 2, 2, "bf16", faults), whole, [3, 2, 3])
    assert copied(one) == {3: [1]}
    assert copied(group) == {2: [0], 3: [1]}


ON_DEVICE: dict[str, tuple[int, str, dict[str, Any], set[str]]] = {
    "replicas": (2, "bf16", kill(3, "reduce"), {"REPLICA"}),
    "no replicas": (1, "fp32", kill(1, "forward", step=6), {"REPLAY"}),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("case", "wire"),
    [
        pytest.param(case, wire, marks=[] if (case, wire) == ("replicas", "staged") else pytest.mark.matrix)
        for case in ON_DEVICE
        for wire in simulated.WIRES
    ],
)
@pytest.mark.skipif(simulated.compiler() is None, reason="no C++ compiler: g++ makes the simulated device")
def test_on_a_device(case: str, wire: str, twin: Twin, tmp_path: Path) -> None:
    """FSDP2 gathers and reduces on streams of its own there."""
    replicas, precision, fault, ways = ON_DEVICE[case]
    simulated.library()  # the ranks find it compiled
    device = simulated.OVER_NCCL if wire == "nccl" else simulated.NAME
    faulted = run(tmp_path, replicas, 2, precision, [fault], device)
    (plan,) = survived(faulted, twin(replicas, 2, precision, device), [fault["rank"]])
    assert simulated.sent_over_communicators(tmp_path) == (wire == "nccl")
    assert ways <= {entry["strategy"] for entry in plan}


MATRIX = [
    *[[kill(rank, phase)] for rank in range(4) for phase in ("forward", "backward", "reduce", "optimizer")],
    *[[kill(1, phase, microbatch=mb)] for phase in ("forward", "backward") for mb in (0, 2)],
    *[[kill(0, phase), kill(1, phase)] for phase in ("forward", "reduce", "optimizer")],
    [kill(0, "backward"), kill(3, "backward")],  # one of each replica, one of each shard
    [kill(1, "idle")],
    [kill(2, "forward", step=0, microbatch=0)],
    [kill(2, "backward", step=2), kill(3, "forward", step=6)],
    [kill(0, "forward", step=6), kill(2, "copy", step=6)],  # the only source dies in the copy
]


def _name(faults: list[dict[str, Any]]) -> str:
    return "+".join("{phase}{rank}.{step}.{microbatch}".format(**fault) for fault in faults)


@pytest.mark.matrix
@pytest.mark.timeout(500)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("faults", MATRIX, ids=_name)
def test_any_kill_is_survived(
    faults: list[dict[str, Any]], precision: str, twin: Twin, tmp_path: Path
) -> None:
    faulted = run(tmp_path, 2, 2, precision, faults)
    survived(faulted, twin(2, 2, precision), [fault["rank"] for fault in faults])


@pytest.mark.matrix
@pytest.mark.timeout(500)
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce"])
def test_a_shard_lost_in_all_replicas_is_replayed_by_all(phase: str, twin: Twin, tmp_path: Path) -> None:
    faulted = run(tmp_path, 2, 2, "fp32", kill_together(0, 2, phase=phase, step=6))
    plans = survived(faulted, twin(2, 2, "fp32"), [0, 2])
    assert {entry["strategy"] for entry in plans[-1]} == {"REPLAY"}


@pytest.mark.matrix
@pytest.mark.timeout(500)
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "optimizer"])
@pytest.mark.parametrize("rank", range(4))
def test_two_stages_of_two_shards(phase: str, rank: int, twin: Twin, tmp_path: Path) -> None:
    faulted = run(tmp_path, 1, 2, "bf16", [kill(rank, phase, step=6)])
    survived(faulted, twin(1, 2, "bf16"), [rank])
