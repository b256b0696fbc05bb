"""Muon for the matrices, AdamW for the rest."""

# verdict: same bits
# plain: 1

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    muon = session.optimizer(torch.optim.Muon(matrices, lr=1e-2))
    adam = session.optimizer(torch.optim.AdamW(others, lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        muon.step()
        adam.step()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, muon=muon, adam=adam)
