"""Drills whose stages are on the simulated device, over staged gloo or the fake NCCL: the digests equal those of the
device's own run without a failure.

The programs get the device as torch loads those of other packages: by the entry point `torch.backends` of the folder
`tests/device/plugin`, which stands on their path; that of `plugin_nccl` offers communicators too.
"""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swift_ft import events
from tests.device import simulated
from tests.integration.logserver_world import python

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        simulated.compiler() is None, reason="no C++ compiler: g++ makes the simulated device"
    ),
]

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "device" / "plugin"
SHAPE = ["--model", "tiny", "--steps", "8", "--microbatches", "4"]


def drill(at: Path, *words: str, plugin: Path = PLUGIN) -> dict[str, Any]:
    simulated.library()  # the ranks find it compiled
    path = os.pathsep.join([str(plugin), str(ROOT), os.environ.get("PYTHONPATH", "")])
    (waits := at / "waits").mkdir(exist_ok=True)
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment |= {"FAKE_NCCL": str(at), "SIMULATED_WAITS": str(waits)}
    command = ["-m", "swift_ft.cli", "drill", "--device", simulated.NAME, *SHAPE, *words]
    done = python(*command, "--json", at / "report.json", env=environment, timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((at / "report.json").read_text())
    assert (report["verdict"], report["exact"], report["bitwise_equal"]) == ("PASS", True, True)
    assert report["negative_control"]["caught"]
    assert not pageable(waits)
    return report


FEW_BYTES = 64


def pageable(waits: Path) -> Counter[str]:
    """What went by way of memory that is not pinned, with its lines: nothing of the state may. The drill's own trainer
    brings batches so."""
    lines = Counter(line for path in waits.iterdir() for line in path.read_text().splitlines())
    assert lines, "the ranks have told nothing"
    found = Counter[str]()
    for line, count in lines.items():
        what, where = line.split(" | ")
        size = re.search(r"pageable memory, (\d+) bytes", what)
        if size and int(size[1]) > FEW_BYTES and not where.startswith("swift/swift_ft/lab/"):
            found[line] = count
    return found


REPLAYS = {
    "1f1b": "rank=1,step=4,microbatch=1,phase=backward",
    "interleaved1f1b": "rank=1,step=4,microbatch=2,phase=forward",
    "zbv": "rank=1,step=4,microbatch=1,phase=backward",
    "dualpipev": "rank=0,step=4,microbatch=1,phase=backward",
}
MATRIX = pytest.mark.matrix


@pytest.mark.parametrize(
    "schedule", [name if name == "1f1b" else pytest.param(name, marks=MATRIX) for name in REPLAYS]
)
def test_a_lost_stage_is_replayed(schedule: str, tmp_path: Path) -> None:
    words = ["--stages", "2", "--schedule", schedule, "--kill", REPLAYS[schedule]]
    report = drill(tmp_path, *words)
    assert "replay" in report["strategy"].values()
    assert report["log"]["verified_sends"] > 0


def test_a_half_applied_step_is_taken_back_and_the_replica_copied(tmp_path: Path) -> None:
    words = ["--stages", "1", "--replicas", "2", "--updates", "wait_free"]
    report = drill(tmp_path, *words, "--kill", "rank=1,step=4,phase=update")
    assert set(report["strategy"].values()) == {"replica"}
    assert (report["undo"]["mode"], report["undo"]["exact"]) == ("exact", True)
    assert report["undo"]["buckets"] > 0


OVER_COMMUNICATORS = {
    # Its neighbours wait in a receive; they have sent it what it needs.
    "--stages 2": "rank=1,step=4,phase=backward",
    "--stages 2 --steps 9": "rank=0,step=4,microbatch=1,phase=forward",
    "--stages 3": "rank=1,step=4,microbatch=2,phase=backward",
    "--stages 2 --schedule interleaved1f1b": "rank=1,step=4,microbatch=2,phase=forward",
    "--stages 2 --schedule zbv": "rank=1,step=4,microbatch=1,phase=forward",
    "--stages 2 --schedule dualpipev": "rank=0,step=4,microbatch=1,phase=backward",
    # In a reduction, in an update, with and without the half of it undone.
    "--stages 1 --replicas 2": "rank=1,step=4,phase=reduce",
    "--stages 1 --replicas 3": "rank=1,step=4,phase=optimizer",
    "--stages 1 --replicas 2 --updates wait_free": "rank=1,step=4,phase=update",
    "--stages 2 --replicas 2": "rank=1,step=4,phase=backward",
    "--stages 1 --replicas 2 --data-parallel ddp": "rank=1,step=4,phase=backward",
    "--stages 1 --replicas 3 --data-parallel ddp": "rank=1,step=4,phase=optimizer",
    "--stages 2 --replicas 2 --data-parallel ddp": "rank=1,step=6,phase=reduce",
    # Another loss while the first one's generation is new.
    "--stages 3 --spares 2": "rank=1,step=4,phase=backward --kill rank=2,phase=replay",
    "--stages 4 --helpers 2": "rank=1,step=6,phase=backward",
    "--stages 2 --strategy checkpoint --checkpoint-every 3": "rank=1,step=6,phase=backward",
    "--stages 2 --replicas 2 --strategy shrink": "rank=1,step=6,phase=backward",
    "--stages 2 --replicas 2 --strategy adaptive": "rank=1,step=6,phase=backward",
    "--stages 2 --replicas 2 --strategy adaptive --staggered on": "rank=1,step=6,phase=backward",
    "--stages 2 --replicas 2 --strategy snapshot": "rank=1,step=6,phase=backward",
}


@pytest.mark.parametrize(
    "words",
    [words if words == "--stages 2" else pytest.param(words, marks=MATRIX) for words in OVER_COMMUNICATORS],
)
def test_over_communicators_whose_waits_do_not_make_the_host_wait(words: str, tmp_path: Path) -> None:
    kill = OVER_COMMUNICATORS[words].split()
    drill(tmp_path, *words.split(), "--kill", *kill, plugin=PLUGIN.with_name("plugin_nccl"))
    assert simulated.sent_over_communicators(tmp_path)


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        ("--strategy checkpoint --checkpoint-every 3", "backward"),
        ("--strategy snapshot", "backward"),
        pytest.param("--helpers 2 --stages 4", "backward", marks=MATRIX),
        pytest.param("--replicas 2 --data-parallel ddp", "reduce", marks=MATRIX),
        pytest.param("--replicas 2 --strategy shrink", "backward", marks=MATRIX),
        pytest.param("--replicas 2 --strategy adaptive", "backward", marks=MATRIX),
        pytest.param("--replicas 2 --strategy adaptive --staggered on", "backward", marks=MATRIX),
        pytest.param("--replicas 2 --strategy snapshot", "backward", marks=MATRIX),
        pytest.param("--replicas 2 --strategy rollback", "backward", marks=MATRIX),
        pytest.param("--replicas 2 --strategy reinit", "backward", marks=MATRIX),
    ],
)
def test_each_strategy(words: str, phase: str, tmp_path: Path) -> None:
    drill(tmp_path, "--stages", "2", *words.split(), "--kill", f"rank=1,step=6,phase={phase}")


@pytest.mark.parametrize("phase", ["backward", pytest.param("forward", marks=MATRIX)])
def test_a_rank_whose_device_fails_ends_at_once_and_is_replaced(phase: str, tmp_path: Path) -> None:
    words = ["--stages", "2", "--kill", f"kind=device,rank=1,step=4,microbatch=1,phase={phase}"]
    report = drill(tmp_path, *words, "--directory", str(tmp_path / "drill"))
    assert "replay" in report["strategy"].values()
    lost = [
        each for each in events.read(tmp_path / "drill" / "run" / "events") if each["event"] == "device_lost"
    ]
    assert [each["rank"] for each in lost] == [1]
    assert "an earlier kernel failed" in lost[0]["reason"]
