"""An optimizer that steps twice in a train_step."""

# verdict: same bits
# worlds: 1, 2
# plain: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        for part in range(2):
            x, y = probe.batch(2 * step + part, session.dp_rank)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
