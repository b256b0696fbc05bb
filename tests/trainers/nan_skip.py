"""A step whose loss is not finite skips its update."""

# verdict: same bits
# worlds: 1, 2
# plain: 1
# device

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, 0)
        if step in (4, 9):
            x = x / 0.0
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
