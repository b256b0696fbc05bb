"""A module whose memory is a deque of a class of its own, which counts what it was given."""

# verdict: named inexact
# says: the module keeps something
# worlds: 1

from collections import deque

import probe
import torch
from torch import nn

import swift_ft


class Ring(deque[float]):
    def __init__(self) -> None:
        super().__init__(maxlen=5)
        self.position = 0

    def push(self, value: float) -> None:
        self.position += 1
        self.append(value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.ring = Ring()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ring.push(float(x.mean()))
        return self.linear(x) + sum(self.ring) + 0.01 * self.ring.position


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
    probe.end(session, model=model, position=model.ring.position, optimizer=optimizer)
