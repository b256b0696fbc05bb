"""How often the host waits for its device in a step: once, before the first update. Whatever else waits is named by its
line."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.device import simulated
from tests.integration.forked import CalmCluster, ForkedCluster, Forks
from tests.integration.trainer_world import until_over

pytestmark = pytest.mark.skipif(
    simulated.compiler() is None, reason="no C++ compiler: g++ makes the simulated device"
)

TRAINER = "tests.integration.trainers.on_device"
STEPS, LEARNT, EVERY = 8, 4, 6
"""In its first steps a session learns what a step changes, which waits; at the end of the last one it writes. Every
sixth step ends with a checkpoint."""

SETTLE = "the step's one wait"
BATCH, LOSS = "the trainer's own: copy from pageable memory, 512 bytes", "the trainer's own: item"

STEP: dict[tuple[str, int, int, str], list[dict[str, int]]] = {
    ("after_backward", 1, 3, "staged"): [{SETTLE: 1, BATCH: 1}, {SETTLE: 1}, {SETTLE: 1, BATCH: 1, LOSS: 1}],
    ("after_backward", 1, 3, "nccl"): [{SETTLE: 1, BATCH: 1}, {SETTLE: 1}, {SETTLE: 1, BATCH: 1, LOSS: 1}],
    ("after_backward", 2, 2, "staged"): [{SETTLE: 1, BATCH: 2, LOSS: 1}] * 2,
    ("after_backward", 2, 2, "nccl"): [{SETTLE: 1, BATCH: 2, LOSS: 1}] * 2,
    ("wait_free", 2, 2, "staged"): [{SETTLE: 1, BATCH: 2, LOSS: 1}] * 2,
    ("ddp", 2, 2, "nccl"): [{SETTLE: 1, BATCH: 2, LOSS: 1}] * 2,
}
"""(updates or "ddp", replicas, ranks, wire) -> for each rank, what waits in a step, and how often."""

CHECKPOINT = {"digests of the state": 1}
"""What a checkpoint adds: replicas are compared, and buffers that no checkpoint has unless a step has changed them."""

REPLAYED = {SETTLE: 1}
"""An inner stage that replays a step. It would not have to wait: what it computes with comes from the log."""


class Step(NamedTuple):
    rank: int
    process: int
    number: int
    replayed: bool
    waits: Counter[str]


def by_whom(what: str, where: str) -> str:
    files = [line.rpartition(":")[0].removeprefix("swift/swift_ft/") for line in where.split(" < ")]
    match what, *files:
        case _, "tests/integration/trainers/on_device.py", *_:
            return f"the trainer's own: {what}"
        case "Event.synchronize", "device.py", "device.py", *_:
            return SETTLE
        case "Event.synchronize", *_ if "state/digests.py" in files:
            return "digests of the state"
    return f"{what}: {where}"


def run(cluster: ForkedCluster, waits: Path) -> list[Step]:
    simulated.library()  # the ranks find it compiled
    waits.mkdir()
    with cluster:
        until_over(cluster)
    steps = []
    for path in waits.iterdir():
        rank, process = map(int, path.name.split("."))
        for line in path.read_text().splitlines():
            number, replayed, seen = json.loads(line)
            counts = Counter[str]()
            for what, where, count in seen:
                counts[by_whom(what, where)] += count
            steps.append(Step(rank, process, number, replayed, counts))
    return steps


@pytest.mark.parametrize(("updates", "replicas", "ranks", "wire"), STEP)
def test_a_step_waits_once_for_its_device(
    updates: str, replicas: int, ranks: int, wire: str, forks: Forks, tmp_path: Path
) -> None:
    trainer = ["-m", TRAINER]
    arguments = [updates, str(replicas), str(STEPS), str(EVERY), str(tmp_path / "waits"), wire]
    cluster = CalmCluster(forks, tmp_path, ranks=ranks, trainer=trainer, trainer_arguments=arguments)
    steps = run(cluster, tmp_path / "waits")
    assert any(tmp_path.glob("messages-*")) == (wire == "nccl")
    for rank, expected in enumerate(STEP[updates, replicas, ranks, wire]):
        later = [step.waits for step in steps if step.rank == rank and LEARNT <= step.number < STEPS - 1]
        with_one = Counter(expected) + Counter(CHECKPOINT)
        assert later == [with_one if number == EVERY - 1 else expected for number in range(LEARNT, STEPS - 1)]


def test_what_a_replay_waits_for(tmp_path: Path) -> None:
    arguments = ["after_backward", "1", str(STEPS), str(EVERY), str(tmp_path / "waits"), "staged"]
    fault = {"id": "f0", "rank": 1, "step": 5, "phase": "backward", "microbatch": 1}
    trainer, faults = ["-m", TRAINER], json.dumps([fault])
    cluster = ForkedCluster(
        tmp_path, ranks=3, spares=1, trainer=trainer, trainer_arguments=arguments, faults=faults
    )
    replayed = [step for step in run(cluster, tmp_path / "waits") if step.replayed]
    assert [(step.rank, step.number) for step in replayed] == [(1, number) for number in range(5)]
    # The first one learns what a step changes; behind the last one the state is compared with the recorded digest.
    assert [step.waits for step in replayed[1:-1]] == [REPLAYED] * 3
