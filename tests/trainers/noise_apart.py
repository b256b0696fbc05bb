"""Noise on the averaged gradients, which each replica draws for itself."""

# verdict: refused
# says: draw noise from a torch.Generator that is seeded by the step
# worlds: 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        session.reduce_gradients()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.1 * torch.randn_like(parameter)
        optimizer.step()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
