"""A OneCycleLR scheduler that was not registered."""

# verdict: named inexact
# worlds: 1, 2
# with 2: named inexact: optimizer 0.param_groups.0.lr

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=40)

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer, scheduler=scheduler)
