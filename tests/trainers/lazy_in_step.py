"""Lazy modules that get their weights in the first step."""

# verdict: refused
# says:
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, model, optimizer), model=model, optimizer=optimizer)
