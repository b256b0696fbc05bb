"""Gradients are halved behind the update and kept for the next step (a poor momentum)."""

# verdict: same bits
# worlds: 1, 2
# kills: moment, optimizer, tail

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
