"""Stochastic weight averaging by torch.optim.swa_utils, from step 6 on, all registered."""

# verdict: same bits
# worlds: 1, 2
# plain: 1
# device

import probe
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(probe.device()))
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    average = AveragedModel(model)
    scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    session.register(average=average, scheduler=scheduler)

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 6:
            average.update_parameters(model)
            scheduler.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer, average=average, scheduler=scheduler)
