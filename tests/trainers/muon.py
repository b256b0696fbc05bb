"""Muon for the matrices, AdamW for the rest."""

# verdict: same bits
# plain: 1

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    muon = session.optimizer(torch.optim.Muon(matrices, lr=1e-2))
    adam = session.optimizer(torch.optim.AdamW(others, lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        muon.step()
        adam.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, muon=muon, adam=adam)
