"""An exponential moving average of the weights that nobody told the session of."""

# verdict: named inexact
# worlds: 1, 2

import copy

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    ema = copy.deepcopy(model)

    def train_step(step: int) -> None:
        loss = probe.update(session, model, optimizer, step)
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer, ema=ema)
