"""Where in a step a rank fails, and what it does there; without a process that ends."""

import copy
import json
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft import events, fault_grammar
from swift_ft.fault_grammar import RankFault, parse
from swift_ft.train import boundary_log
from swift_ft.train.fault_points import FaultInjector

Make = Callable[..., FaultInjector]


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[signal.Signals]:
    """Those that this process sends to itself."""
    sent: list[signal.Signals] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(signal.Signals(number)))
    return sent


@pytest.fixture
def injector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(*specs: str, rank: int = 1) -> FaultInjector:
        told = []
        for index, spec in enumerate(specs):
            fault = parse(spec)
            assert isinstance(fault, RankFault)
            told.append(fault_grammar.item(fault, f"fault{index}"))
        monkeypatch.setenv("SWIFT_FAULTS", json.dumps(told))
        monkeypatch.setenv("SWIFT_FAULTS_DIR", str(tmp_path))
        return FaultInjector(rank)

    return make


def test_a_rank_dies_once_and_only_there(injector: Make, signals: list[signal.Signals]) -> None:
    faults = injector("rank=1,step=3,microbatch=2,phase=forward")
    for phase, step, microbatch in (("backward", 3, 2), ("forward", 2, 2), ("forward", 3, 1), ("idle", 3, 0)):
        faults.at(phase, step, microbatch)
    faults.at("forward", 3, 2, layer="blocks.0")
    injector("rank=0,step=3,microbatch=2,phase=forward").at("forward", 3, 2)
    assert signals == []
    faults.at("forward", 3, 2)
    faults.at("forward", 3, 2)
    assert signals == [signal.SIGKILL]


def test_at_a_layer_and_nowhere_else(injector: Make, signals: list[signal.Signals]) -> None:
    faults = injector("rank=1,step=3,phase=backward,layer=blocks.1", "rank=0,step=3,phase=forward,layer=x")
    assert faults.layers == ["blocks.1"]
    faults.at("backward", 3)
    assert injector("rank=1,step=3,phase=forward").layers == [""]
    faults.at("backward", 3, layer="blocks.0")
    faults.at("forward", 3, layer="blocks.1")
    assert signals == []
    faults.at("backward", 3, layer="blocks.1")
    assert signals == [signal.SIGKILL]


def test_behind_a_bucket_or_in_the_middle_of_them(injector: Make, signals: list[signal.Signals]) -> None:
    faults = injector("rank=1,step=3,phase=optimizer,bucket=2", "rank=1,step=4,phase=optimizer")
    behind = []
    for step in (3, 4):
        for bucket in range(4):
            faults.behind_bucket("optimizer", step, bucket, is_middle=bucket == 1)
            behind.append((step, bucket, len(signals)))
    assert next(place[:2] for place in behind if place[2] > 0) == (3, 2)
    assert next(place[:2] for place in behind if place[2] > 1) == (4, 1)
    assert not injector("rank=1,step=3,phase=update,bucket=2").due("update", 3), "it is not half-way"


def test_it_stops_itself(injector: Make, signals: list[signal.Signals]) -> None:
    injector("kind=stop,rank=1,step=3,phase=idle").at("idle", 3)
    assert signals == [signal.SIGSTOP]


def test_it_hangs_for_so_long_and_says_when_it_is_over(injector: Make, signals: list[signal.Signals]) -> None:
    said: list[str] = []
    end = events.listen(lambda event, fields: said.append(event))
    injector("kind=hang,rank=1,step=3,phase=idle,for=0.05").at("idle", 3)
    end()
    assert said == ["fault", "fault_over"]
    assert signals == []


@pytest.mark.parametrize("spec", ["kind=slow,factor=2,for=1"])
def test_what_it_cannot_do_to_itself_it_waits_for(
    spec: str, injector: Make, signals: list[signal.Signals], tmp_path: Path
) -> None:
    (tmp_path / "fault0.go").touch()
    injector(f"{spec},rank=1,step=3,phase=idle").at("idle", 3)
    assert (tmp_path / "fault0.reached").exists()
    assert signals == []


# --- layers ---


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    module(torch.ones(3, 4)).square().sum().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def test_a_layer_is_reached_in_both_directions_and_changes_no_bit() -> None:
    reached: list[tuple[str, str]] = []
    watched = model()
    for name in ("1.0", "2", "7"):
        boundary_log.watch(watched, name, lambda phase, name=name: reached.append((phase, name)))  # type: ignore[misc]
    for mine, plain in zip(gradients(watched), gradients(model()), strict=True):
        assert torch.equal(mine, plain)
    assert reached == [("forward", "1.0"), ("forward", "2"), ("backward", "2"), ("backward", "1.0")]


def test_a_whole_model_is_reached_whatever_it_returns() -> None:
    reached: list[str] = []
    whole = model()
    boundary_log.watch(whole, "", reached.append)
    whole.register_forward_hook(
        lambda _module, _given, output: {"loss": output.square().sum(), "logits": output}
    )
    boundary_log.watch(whole, "", reached.append)
    whole(torch.ones(3, 4))["loss"].backward()
    assert reached == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])  # noqa: S301
def test_a_copy_of_a_module_is_not_watched(copied: Callable[[nn.Module], Any]) -> None:
    reached: list[str] = []
    watched = model()
    boundary_log.watch(watched, "0", reached.append)
    gradients(copied(watched))
    assert reached == []
