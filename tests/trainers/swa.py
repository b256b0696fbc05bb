"""Stochastic weight averaging by torch.optim.swa_utils, from step 6 on, all registered."""

# verdict: same bits
# worlds: 1, 2
# plain: 1
# device

import probe
import torch
from torch.optim.swa_utils import SWALR, AveragedModel

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    average = AveragedModel(model)
    scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    session.register(average=average, scheduler=scheduler)

    def train_step(step: int) -> None:
        loss = probe.update(session, model, optimizer, step)
        if step >= 6:
            average.update_parameters(model)
            scheduler.step()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer, average=average, scheduler=scheduler)
