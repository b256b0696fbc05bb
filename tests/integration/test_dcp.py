"""torch's DCP at both ends of a job: it goes on from a directory of torch's, and torch opens what is exported of it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from swift_ft.lab.drill.cluster import JOB
from swift_ft.state.export import alone
from swift_ft.tools import export
from tests.integration.again_world import Again
from tests.integration.trainer_world import TRAINERS, run_trainer

STEPS = 5
DYING = 3


def trainer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its functions."""
    monkeypatch.setattr(sys, "argv", ["from_dcp.py", "", "0", "0", ""])
    spec = importlib.util.spec_from_file_location("from_dcp", TRAINERS / "from_dcp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(240)
def test_from_torchs_directory_to_torchs_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = trainer(monkeypatch)
    model, optimizer = plain.make()
    for step in range(plain.BEGUN):
        plain.step_plainly(model, optimizer, step)
    with alone():
        before = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": plain.BEGUN}
        save(before, checkpoint_id=tmp_path / "before", no_dist=True)

    with Again(tmp_path / "job") as job:
        arguments = (tmp_path / "before", STEPS, DYING, tmp_path)
        assert job.run("from_dcp.py", *arguments, flags=["--strategy", "checkpoint"]) == 0, job.said
        assert "killed by SIGKILL" in job.said
    words = ["--checkpoint-dir", str(tmp_path / "job" / "checkpoints"), "--job", JOB, str(tmp_path / "out")]
    assert export.main(words) == 0

    for step in range(plain.BEGUN, plain.BEGUN + STEPS):
        plain.step_plainly(model, optimizer, step)
    other, others_optimizer = plain.make()
    plain.step_plainly(other, others_optimizer, 0)  # its state has what is to be filled
    after = {
        "stages": {"0": other.state_dict()},
        "ranks": {"0": {"optimizers": [others_optimizer.state_dict()]}},
        "version": -1,
    }
    with alone():
        load(after, checkpoint_id=tmp_path / "out", no_dist=True)
    assert after["version"] == STEPS
    assert_equal(after["stages"]["0"], model.state_dict())  # type: ignore[index]
    state = after["ranks"]["0"]["optimizers"][0]["state"]  # type: ignore[index]
    for index, kept in optimizer.state_dict()["state"].items():
        assert_equal(state[index], kept)


@pytest.mark.timeout(300)
def test_a_sharded_job_that_went_back_is_exported_whole_and_another_begins_with_it(tmp_path: Path) -> None:
    """Two replicas of two uneven FSDP2 shards: a rank is lost, all restore their checkpoint; torch opens the end."""
    whole = tmp_path / "whole"
    whole.mkdir()
    fault = {"rank": 3, "phase": "backward", "step": 5, "microbatch": 1}
    arguments = (8, 2, 2, "fp32", "cpu", "checkpoint", whole)
    run = run_trainer(tmp_path / "job", "hsdp.py", *arguments, ranks=4, faults=[fault])
    (plan,) = [event["ranks"] for event in run["events"] if event["event"] == "plan"]
    assert {entry["strategy"] for entry in plan} == {"CHECKPOINT"}
    words = ["--checkpoint-dir", str(tmp_path / "job" / "checkpoints"), "--job", JOB, str(tmp_path / "out")]
    assert export.main(words) == 0

    ends = [torch.load(whole / f"rank{rank}.pt", weights_only=True) for rank in range(4)]
    for end in ends:
        ours = {
            "stages": {"0": {name: torch.zeros_like(value) for name, value in end["weights"].items()}},
            "ranks": {
                "0": {"objects": {"average": {"values": [torch.zeros_like(v) for v in end["averages"]]}}}
            },
        }
        with alone():
            load(ours, checkpoint_id=tmp_path / "out", no_dist=True)
        assert_equal(ours["stages"]["0"], end["weights"])
        average = ours["ranks"]["0"]["objects"]["average"]["values"]
        assert all(map(torch.equal, average, end["averages"]))

    begun = (1, 2, 2, "fp32", "cpu", "auto", whole, tmp_path / "out")
    run_trainer(tmp_path / "begun", "hsdp.py", *begun, ranks=4, faults=[])
    on = torch.load(whole / "rank0.pt", weights_only=True)["weights"]
    assert not any(torch.equal(value, ends[0]["weights"][name]) for name, value in on.items()), "it goes on"


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
