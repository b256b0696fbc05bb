"""Every optimizer that a drill offers is there, and is the one that was asked for."""

import pytest
import torch

from swift_ft.lab.drill.model import make_optimizer
from swift_ft.lab.drill.options import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_makes_a_step(name: str) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4))
    before = parameter.detach().clone()
    optimizer = make_optimizer(name, [parameter])
    parameter.grad = torch.randn(4)
    optimizer.step()
    assert not torch.equal(parameter.detach(), before)


def test_sgd_is_nesterov_and_amsgrad_is_adamw() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = make_optimizer("sgd", [parameter])
    assert (sgd.param_groups[0]["nesterov"], sgd.param_groups[0]["momentum"]) == (True, 0.9)
    assert sgd.param_groups[0]["weight_decay"] > 0
    amsgrad = make_optimizer("amsgrad", [parameter])
    assert isinstance(amsgrad, torch.optim.AdamW)
    assert amsgrad.param_groups[0]["amsgrad"] is True
