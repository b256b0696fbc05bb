"""The benchmark of saves: what it counts, and that it says what cannot be saved."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import ServiceError
from swift_ft.lab.bench.checkpoint import WAYS, Bench
from swift_ft.lab.bench.command import run
from swift_ft.state.checkpoint_store import CheckpointStore

SMALL = 600_000


def test_every_way_is_measured_in_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    words = ["--parameters", str(SMALL), "--rounds", "2", "--directory", str(tmp_path), "--json", str(path)]
    assert run("checkpoint", words) == 0
    result = json.loads(path.read_text())
    assert set(result["ways"]) == set(WAYS)
    # Parameters and two tensors of the optimizer for each, of four bytes; and its counts of steps.
    assert result["state_bytes"] == pytest.approx(12 * result["parameters"], rel=0.001)
    for way, case in result["ways"].items():
        assert case["stall_s"] > 0, way
        if way in ("sync", "dcp"):
            assert case["durable_s"] <= case["stall_s"] == case["cost_s"], way
    assert "goal at most 3: " in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_steps_are_done_until_an_asynchronous_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write does not end before a step was done; what the step took longer is its cost."""
    bench = Bench(tmp_path, SMALL)
    stepped, write = threading.Event(), CheckpointStore._write

    def waits(self: CheckpointStore, *arguments: Any) -> int:
        assert stepped.wait(30.0)
        return write(self, *arguments)

    def step() -> float:
        stepped.set()
        return 7.0

    monkeypatch.setattr(CheckpointStore, "_write", waits)
    monkeypatch.setattr(bench.trainer, "step", step)
    bench.save("async", plain=2.0)
    assert bench.rounds.values["async cost"][0] >= 5.0
    assert bench.rounds.values["async stall"][0] < bench.rounds.values["async durable"][0] < 30.0


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_saved_is_said(way: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "there", SMALL)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / way).touch()
    with pytest.raises(ServiceError, match="nothing can be saved in"):
        bench.save(way, plain=0.0)
    shutil.rmtree(tmp_path / "there")
