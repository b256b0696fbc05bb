"""Kendall's loss weights are parameters outside of every module, in the optimizer's second group."""

# verdict: refused
# says: in no stage

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
    weights = nn.Parameter(torch.zeros(2))
    optimizer = session.optimizer(
        torch.optim.Adam([{"params": model.parameters()}, {"params": [weights], "lr": 1e-1}], lr=1e-2)
    )

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        y = model(x)
        losses = torch.stack([(y[:, 0] - x.sum(1)).square().mean(), (y[:, 1] - x.prod(1)).abs().mean()])
        loss = (losses * torch.exp(-weights) + weights).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer, weights=weights)
