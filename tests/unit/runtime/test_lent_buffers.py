"""Forwards for other ranks between a rank's own forwards and backwards leave no trace (`KeptModules`)."""

import pytest
import torch
from torch import nn

from swift_ft.state.module_state import KeptModules


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def gradients(
    batches: list[torch.Tensor], *, others: list[torch.Tensor], lends: bool = True
) -> list[torch.Tensor]:
    """All forwards come first, those for others after each of one's own; then the backwards."""
    module = model()
    kept = KeptModules([module])
    own, theirs = [], []
    for batch, other in zip(batches, others, strict=True):
        own.append(module(batch).square().sum())
        kept.keep()
        if lends:
            kept.lend()
        theirs.append(module(other).square().sum())
        kept.restore()
    for loss in own:
        loss.backward()
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    found += [buffer.clone() for buffer in module.buffers()]
    for loss in theirs:
        loss.backward()
    return found


def batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 4, generator=generator) for _ in range(3)]


def test_backwards_find_what_their_forwards_have_saved_and_buffers_are_ones_own() -> None:
    mixed = gradients(batches(1), others=batches(2))
    module = model()
    for loss in [module(batch).square().sum() for batch in batches(1)]:
        loss.backward()
    alone = [p.grad for p in module.parameters() if p.grad is not None] + list(module.buffers())
    assert all(torch.equal(one, other) for one, other in zip(mixed, alone, strict=True))


def test_buffers_that_are_not_lent_break_the_backward() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(batches(1), others=batches(2), lends=False)


def test_buffers_that_share_memory_share_it_while_they_are_lent() -> None:
    module = nn.Module()
    table = torch.arange(6.0).reshape(2, 3)
    for name, buffer in (("table", table), ("again", table), ("row", table[1]), ("turned", table.T[1:])):
        module.register_buffer(name, buffer, persistent=name != "row")
    module.register_buffer("none", None)
    module.register_buffer("empty", torch.empty(0))
    kept = KeptModules([module])
    kept.keep()
    kept.lend()
    module.table.add_(10.0)
    assert torch.equal(module.again, module.table)
    assert torch.equal(module.row, torch.tensor([13.0, 14.0, 15.0]))
    assert torch.equal(module.turned, torch.tensor([[11.0, 14.0], [12.0, 15.0]]))
    assert module.turned.stride() == table.T[1:].stride()
    kept.restore()
    assert module.table is table
    assert torch.equal(table, torch.arange(6.0).reshape(2, 3))
    assert torch.equal(module.row, torch.tensor([3.0, 4.0, 5.0]))


def test_what_autograd_follows_is_not_lent() -> None:
    module = nn.Module()
    weight = nn.Parameter(torch.ones(2))
    module.register_buffer("scaled", weight * 2)
    scaled = module.scaled
    kept = KeptModules([module])
    kept.keep()
    kept.lend()
    assert module.scaled is scaled
    kept.restore()
