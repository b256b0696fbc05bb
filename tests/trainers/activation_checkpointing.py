"""Activation checkpointing over a block with dropout and a custom autograd Function."""

# verdict: same bits
# worlds: 1, 2
# device

import probe
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swift_ft


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        y = x / (1 + x.abs())
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + x.abs()) ** 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(Squash.apply(self.first(x)), 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.block, x, use_reentrant=False))


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Model().to(probe.device()))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
