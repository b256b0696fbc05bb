"""Accumulation as scripts often have it: train_step is called for each batch, every fourth one updates."""

# verdict: same bits
# kills: moment, idle, tail
# worlds: 1, 2
# plain: 1

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y) / 4
        loss.backward()
        if (step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
