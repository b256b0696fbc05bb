"""A step that begins with the update by the gradients of the one before."""

# verdict: same bits
# kills: moment, idle, tail
# worlds: 1, 2
# with 2: refused: what is computed behind the update

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        optimizer.step()
        optimizer.zero_grad()
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
