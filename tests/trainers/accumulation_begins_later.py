"""Accumulation that grows: each batch updates at first, later only every second one."""

# verdict: same bits
# kills: moment, idle, tail
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        count = 2 if step >= 4 else 1
        if step % count == 0:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y) / count
        loss.backward()
        if step % count == count - 1:
            optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
