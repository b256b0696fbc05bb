"""Another optimizer from step 6 on, which the session is given only then."""

# verdict: refused
# worlds: 1, 2
# says: was given an optimizer in train_step

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer: torch.optim.Optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        global optimizer
        if step == 6:
            optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
        probe.note(step, probe.update(session, model, optimizer, step))

    probe.run(session, train_step, model=model, optimizer=optimizer)
