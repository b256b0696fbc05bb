"""Addends that are kept and added later have the bits of autograd's own sum."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from swift_ft.state.tensors import same_bits
from swift_ft.train.gradient_chain import Addends, added_in_order

MICROBATCHES = 5


class Everything(nn.Module):
    """Parameters used several times in a microbatch, in some microbatches, in none; and strides of their own."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.reentrant = reentrant
        self.often, self.sometimes, self.never = nn.Linear(33, 33), nn.Linear(33, 33), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(33))
        self.strided = nn.Parameter(torch.randn(33, 7).t())
        self.frozen = nn.Parameter(torch.randn(33), requires_grad=False)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.often(x)) * self.scale

    def forward(self, x: torch.Tensor, mb: int) -> torch.Tensor:
        for _ in range(3):
            x = (
                self.block(x)
                if self.reentrant is None
                else checkpoint(self.block, x, use_reentrant=self.reentrant)
            )
        if mb % 2:
            x = x + self.sometimes(x)
        return (x + self.frozen).sum() + (x @ self.strided.t()).square().sum()


def microbatches(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(7, 33).to(dtype).requires_grad_() for _ in range(MICROBATCHES)]


def made(dtype: torch.dtype, reentrant: bool | None) -> Everything:
    torch.manual_seed(1)
    return Everything(reentrant).to(dtype)


@pytest.mark.filterwarnings("ignore")  # torch's checkpointing of its own workings
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("first_share", [0, 1, 3])
def test_the_bits_of_one_process(dtype: torch.dtype, reentrant: bool | None, first_share: int) -> None:
    plain = made(dtype, reentrant)
    for mb, x in enumerate(microbatches(dtype)):
        plain(x, mb).backward()

    module = made(dtype, reentrant)
    parameters = list(module.parameters())
    xs = microbatches(dtype)
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    for share in (range(first_share), range(first_share, MICROBATCHES)):
        own = Addends(parameters, first=share.start == 0)
        for mb in share:
            module(xs[mb], mb).backward()
        sums = [added_in_order(total, mine) for total, mine in zip(sums, own.collect(), strict=True)]
        assert all(parameter.grad is None for parameter in parameters)

    for (name, parameter), total in zip(plain.named_parameters(), sums, strict=True):
        if parameter.grad is None:
            assert total is None, name
        else:
            assert total is not None, name
            assert total.stride() == parameter.grad.stride(), name
            assert same_bits(total, parameter.grad), name


@pytest.mark.filterwarnings("ignore")
def test_a_sum_by_microbatch_has_other_bits_where_blocks_are_checkpointed() -> None:
    """What the addends are for: with reentrant checkpointing autograd adds once a block, not once a microbatch."""
    plain, other = made(torch.float32, True), made(torch.float32, True)
    for mb, x in enumerate(microbatches(torch.float32)):
        plain(x, mb).backward()
    sums: dict[str, torch.Tensor] = {}
    for mb, x in enumerate(microbatches(torch.float32)):
        other(x, mb).backward()
        for name, parameter in other.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums[name].add_(parameter.grad) if name in sums else parameter.grad
                parameter.grad = None
    weight = plain.often.weight.grad
    assert weight is not None
    assert not same_bits(sums["often.weight"], weight)


def test_a_negative_zero_is_not_added_to_nothing() -> None:
    total = added_in_order(None, [torch.tensor([-0.0])])
    assert total is not None
    assert torch.signbit(total).item()


def test_closed_addends_take_nothing_more() -> None:
    parameter = nn.Parameter(torch.ones(3))
    addends = Addends([parameter])
    (parameter * 2).sum().backward()
    addends.close()
    (parameter * 3).sum().backward()
    assert [a.tolist() for a in addends.of[0]] == [[2.0, 2.0, 2.0]]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3.0, 3.0, 3.0]
