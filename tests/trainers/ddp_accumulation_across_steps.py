"""DistributedDataParallel, whose gradients are accumulated over four calls of train_step."""

# verdict: refused
# worlds: 2
# says: what DistributedDataParallel is to average later

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(session.ddp(probe.net()))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        if step % 4:
            with session.accumulating():
                loss = nn.functional.mse_loss(model(x), y) / 4
                loss.backward()
        else:
            loss = nn.functional.mse_loss(model(x), y) / 4
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
