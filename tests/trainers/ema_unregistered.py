"""An exponential moving average of the weights that nobody told the session of."""

# verdict: named inexact
# worlds: 1, 2

import copy

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    ema = copy.deepcopy(model)

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer, ema=ema)
