"""Dropout in two places."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft


def batch(step: int, dp_rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1000 * step + dp_rank))
    return x, x.sum(1, keepdim=True)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(
        nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
    )
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
