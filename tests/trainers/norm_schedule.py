"""A rate that follows the norm of the last gradient, kept in the optimizer's defaults and in a closure's cell."""

# verdict: named inexact
# worlds: 1
# says: optimizer 0.param_groups.0.lr

import probe
import torch
from torch import nn

import swift_ft


def follower():
    norm = 1.0

    def follow(parameters, group) -> None:
        nonlocal norm
        total = torch.stack([p.grad.norm() for p in parameters]).norm().item()
        norm = 0.9 * norm + 0.1 * total
        group["lr"] = 1e-2 / (1.0 + norm)

    return follow


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    follow = follower()

    def train_step(step: int) -> None:
        x = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        follow(list(model.parameters()), optimizer.param_groups[0])
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
