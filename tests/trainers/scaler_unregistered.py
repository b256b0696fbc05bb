"""A GradScaler that was not registered, and overflows twice; replicas unscale before gradients are averaged."""

# verdict: same bits
# worlds: 1, 2
# with 2: refused: let all replicas decide alike

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=3)

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer, scaler=scaler)
