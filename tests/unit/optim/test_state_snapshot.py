"""What an optimizer keeps besides its parameters goes back with its step."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from swift_ft.state.exact_undo import Kept, PreImage

GENERATORS: dict[str, Any] = {
    "torch": torch.Generator().manual_seed(3),
    "random": random.Random(3),
    "default_rng": np.random.default_rng(3),
    "RandomState": np.random.RandomState(3),
}


def drawn(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


class Around(torch.optim.Optimizer):
    """Another optimizer, with noise of its own, as SAM and Lookahead have one inside."""

    def __init__(self, parameters: list[torch.nn.Parameter], generator: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.base.outer = self  # type: ignore[attr-defined]
        self.generator = generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.add_(drawn(self.generator))
        self.base.step()
        self.base.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("before", [0, 2])
def test_an_optimizer_around_another_one_is_taken_back(generator: str, before: int) -> None:
    parameters = [torch.nn.Parameter(torch.arange(4.0))]
    optimizer = Around(parameters, GENERATORS[generator])

    def step() -> None:
        parameters[0].grad = torch.ones(4)
        optimizer.step()

    for _ in range(before):
        step()
    image = PreImage(optimizer, parameters, whole=True)
    step()
    once = parameters[0].detach().clone()
    image.undo()
    step()
    assert torch.equal(parameters[0], once), "momentum, rate and noise are applied once"
    assert optimizer.base.param_groups[0]["params"][0] is parameters[0]


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_generator_draws_again_what_it_drew(generator: str) -> None:
    holder = {"nested": [GENERATORS[generator]]}
    kept = Kept(holder)
    first = [drawn(GENERATORS[generator]) for _ in range(3)]
    assert kept.restore() == {"nested": [GENERATORS[generator]]}
    assert [drawn(GENERATORS[generator]) for _ in range(3)] == first


def test_the_state_of_an_optimizer_inside_another_one_is_left_out_where_it_cannot_have_changed() -> None:
    """It is as large as the parameters, and a step begins more often than it is taken back."""
    parameters = [torch.nn.Parameter(torch.arange(4.0))]
    optimizer = Around(parameters, GENERATORS["random"])
    parameters[0].grad = torch.ones(4)
    optimizer.step()
    kept = Kept({"base": optimizer.base}, states=False)
    assert kept.pairs == []
    copies = Kept({"base": optimizer.base}).pairs
    assert sum(copied.nbytes for _, copied in copies) == parameters[0].nbytes
    optimizer.base.param_groups[0]["lr"] = 7.0
    optimizer.base.noted = 1  # type: ignore[attr-defined]
    kept.restore()
    assert optimizer.base.param_groups[0]["lr"] == 0.05
    assert "noted" not in vars(optimizer.base)
