"""A OneCycleLR scheduler that was not registered."""

# verdict: named inexact
# worlds: 1, 2
# with 2: named inexact: optimizer 0.param_groups.0.lr

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=40)

    def train_step(step: int) -> None:
        loss = probe.update(session, model, optimizer, step)
        scheduler.step()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer, scheduler=scheduler)
