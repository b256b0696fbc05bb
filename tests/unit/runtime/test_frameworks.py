"""What frameworks need of torch and of modules' states, without the frameworks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import swift_ft
from swift_ft import torch_private
from swift_ft.integrations import Attributes
from swift_ft.state.module_state import load_module, state_of_module

INTEGRATIONS = Path(swift_ft.__file__).parent / "integrations"
LINES_MAX = 150


@pytest.mark.parametrize("framework", ["huggingface", "lightning", "torchtitan"])
def test_an_integration_is_small(framework: str) -> None:
    assert len((INTEGRATIONS / f"{framework}.py").read_text().splitlines()) <= LINES_MAX


def test_attributes_are_the_plain_ones_without_times() -> None:
    class Callback:
        patience = 3

        def __init__(self, best: float) -> None:
            self.best, self.scores, self.model, self.last_time = (
                best,
                {"a": torch.ones(2)},
                nn.Linear(1, 1),
                7.0,
            )

    first, second = Callback(1.0), Callback(2.0)
    state = Attributes(lambda: first).state_dict()
    assert list(state) == ["best", "scores"]
    Attributes(lambda: second).load_state_dict(state)
    first.scores["a"].zero_()
    assert second.best == 1.0
    assert torch.equal(second.scores["a"], torch.ones(2))
    assert Attributes(lambda: first, "patience").state_dict() == {"patience": 3}


class Split(nn.Module):
    """Saves its weight in halves, as torchtitan saves a fused layer in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))
        self.called: list[str] = []
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        module.called.append("split")
        whole = state.pop(f"{prefix}weight")
        state[f"{prefix}upper"], state[f"{prefix}lower"] = whole[:2].clone(), whole[2:].clone()

    @staticmethod
    def _merge(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.called.append("merge")
        state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}upper"), state.pop(f"{prefix}lower")])


def test_a_state_is_what_the_module_holds() -> None:
    """An author's hook may copy, rename or communicate; one of torch's own is called, as that of a wrapper which hides
    its name."""
    split, other = Split(), Split()
    module, empty = nn.Sequential(checkpoint_wrapper(split)), nn.Sequential(checkpoint_wrapper(other))
    state = state_of_module(module)
    assert list(state) == ["0.weight"]
    assert state["0.weight"].data_ptr() == split.weight.data_ptr()
    load_module(empty, state)
    assert torch.equal(other.weight, split.weight)
    assert (split.called, other.called) == ([], [])
    assert list(module.state_dict()) == ["0.upper", "0.lower"]  # the author's own file is as it was


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradient(given: dict[str, Any], *, adapted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, torch.device("cpu")), 2, loss_fn=nn.MSELoss())
    losses: list[torch.Tensor] = []
    if adapted:
        torch_private.take_microbatches(schedule)
    x = given.pop("x", None)
    schedule.step(*([] if x is None else [x]), losses=losses, **given)
    assert module.weight.grad is not None
    return module.weight.grad, torch.stack(losses)


@pytest.mark.usefixtures("alone")
def test_a_batch_may_be_split_already() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    wanted = gradient({"x": x, "target": y}, adapted=False)
    halves = {"arg_mbs": [(half,) for half in x.chunk(2)], "target_mbs": [*y.chunk(2)]}
    for given in ({"x": x, "target": y}, halves):
        for mine, other in zip(gradient(given, adapted=True), wanted, strict=True):
            assert torch.equal(mine, other)
