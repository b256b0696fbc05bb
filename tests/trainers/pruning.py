"""Weights are pruned further every three steps: a mask in a buffer, the pruned weight in a plain attribute."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn
from torch.nn.utils import prune

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    prune.l1_unstructured(net[0], "weight", amount=0.05)
    model = session.module(net)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        loss = probe.update(session, model, optimizer, step)
        if step % 3 == 2:
            prune.l1_unstructured(net[0], "weight", amount=0.1)
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
