"""Losses reported by session.log: every step once, whatever dies between the update and the line."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        loss = probe.backward(session, model, optimizer, step)
        session.log(loss=loss)
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    lines = probe.logged(session)
    assert [line["step"] for line in lines] == list(range(probe.steps()))
    probe.end(session, model=model, optimizer=optimizer, lines=[line["loss"] for line in lines])
