"""A module that numbers its calls by itertools.count, and warms up by them."""

# verdict: named inexact
# says: output 0 of the module in its forward
# worlds: 1, 2

import itertools

import probe
import torch
from torch import nn

import swift_ft


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.calls = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * min(1.0, next(self.calls) / 20)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Net())
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, linear=model.linear, optimizer=optimizer)
