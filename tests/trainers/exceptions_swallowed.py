"""A bare except around forward and backward, as in scripts that skip bad batches."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, 0)
        optimizer.zero_grad()
        try:
            if step in (3, 7):
                raise ValueError("a bad sample")
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            probe.note(step, loss)
        except Exception as error:
            print(f"step {step}: {error}; skipped", flush=True)

    probe.run(session, train_step, model=model, optimizer=optimizer)
