"""DistributedDataParallel by the author himself."""

# verdict: refused
# worlds: 2
# says: session.ddp

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(nn.parallel.DistributedDataParallel(probe.net()))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, model, optimizer), model=model, optimizer=optimizer)
