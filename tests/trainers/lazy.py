"""Lazy modules, initialised by a dummy forward before session.module; batches grow over time (a curriculum)."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(1))
    model(torch.zeros(1, 8))
    session.module(model)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank, 4 + 3 * (step // 4))
        probe.descend(step, optimizer, nn.functional.mse_loss(model(x), y))

    probe.run(session, train_step, model=model, optimizer=optimizer)
