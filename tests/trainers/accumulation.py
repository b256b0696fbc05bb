"""Gradient accumulation: four backward passes, one update, gradients averaged."""

# verdict: same bits
# worlds: 1, 2
# device

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        losses = []
        for part in range(4):
            x, y = probe.batch(4 * step + part, session.dp_rank)
            loss = nn.functional.mse_loss(model(x), y) / 4
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        probe.note(step, torch.stack(losses).sum())

    probe.run(session, train_step, model=model, optimizer=optimizer)
