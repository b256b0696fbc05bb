"""Prioritised replay: priorities in the middle of a list of 20,000 numbers."""

# verdict: named inexact
# worlds: 1, 2
# says: the gradient of parameter

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    priorities = [1.0] * 20_000
    samples = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(session.dp_rank))

    def train_step(step: int) -> None:
        place = 9_000 + 4 * step
        x = samples[place : place + 16]
        weights = torch.tensor(priorities[place : place + 16])
        losses = (model(x) - x.sum(1, keepdim=True)).square().squeeze(1)
        priorities[place : place + 16] = losses.tolist()
        probe.descend(step, optimizer, (losses * weights).mean())

    probe.run(session, train_step, model=model, optimizer=optimizer)
