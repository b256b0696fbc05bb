"""A learning-rate finder: the rate grows by hand each step, weights are reset at the end."""

# verdict: named inexact
# misses: 1, 2
# because: nothing is computed from the list of losses, so no rehearsal compares it
# worlds: 1, 2

import copy

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = copy.deepcopy(model.state_dict())
    history: list[float] = []

    def train_step(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-5 * 2.0**step
        loss = probe.update(session, model, optimizer, step)
        history.append(float(loss))
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    best = min(range(len(history)), key=history.__getitem__, default=-1)
    model.load_state_dict(before)
    probe.end(session, model=model, optimizer=optimizer, history=history)
