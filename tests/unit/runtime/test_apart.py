"""Gradients of microbatches that come mixed and out of order have the bits of each batch by itself."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swift_ft.train.batch_redistribution import Accumulator

OWN, OTHER = 0, 1


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))


def backward(module: nn.Module, origin: int, microbatch: int) -> None:
    generator = torch.Generator().manual_seed(100 * origin + microbatch)
    scale = 10.0 ** (microbatch % 5 - 2)  # sums in another order have other bits
    layer = module[2] if microbatch % 3 == 2 else module  # some use not all parameters
    (layer(torch.randn(5, 7, generator=generator)) * scale).square().mean().backward()


def by_itself(origin: int, microbatches: list[int]) -> list[torch.Tensor | None]:
    module = model()
    for microbatch in microbatches:
        backward(module, origin, microbatch)
    return gradients(module)


def same(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


@settings(max_examples=80, deadline=None)
@given(st.permutations([(origin, mb) for origin in (OWN, OTHER) for mb in range(5)]))
def test_whatever_order_they_come_in(order: list[tuple[int, int]]) -> None:
    module = model()
    accumulators = {
        origin: Accumulator(module.parameters(), range(5), own=origin == OWN) for origin in (OWN, OTHER)
    }
    for origin, microbatch in order:
        with accumulators[origin].adding(microbatch):
            backward(module, origin, microbatch)
    assert same(gradients(module), by_itself(OWN, list(range(5))))
    theirs = [accumulators[OTHER].gradients.get(p) for p in module.parameters()]
    assert same(theirs, by_itself(OTHER, list(range(5))))


def test_the_order_matters() -> None:
    """Else the test above could not fail."""
    assert not same(by_itself(OWN, [0, 1, 2, 3, 4]), by_itself(OWN, [4, 3, 2, 1, 0]))
