"""Early stopping by an exception of the author's own, caught around session.run."""

# verdict: refused
# says: call session.stop()
# worlds: 1, 2

import contextlib

import probe
import torch

import swift_ft


class StopTraining(Exception):
    pass


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        loss = probe.update(session, model, optimizer, step)
        probe.note(step, loss)
        if step == 9:
            raise StopTraining

    with contextlib.suppress(StopTraining):
        probe.run(session, train_step, model=model, optimizer=optimizer)
