"""Gradients are halved behind the update and kept for the next step (a poor momentum)."""

# verdict: same bits
# worlds: 1, 2
# kills: moment, optimizer, tail

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
