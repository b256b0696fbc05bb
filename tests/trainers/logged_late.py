"""One of the replicas begins to report its losses by session.log when training is under way."""

# verdict: same bits
# worlds: 2

import probe
import torch

import swift_ft

FIRST = 5


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        loss = probe.backward(session, model, optimizer, step)
        if session.rank == 1 and step >= FIRST:
            session.log(loss=loss)
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    lines = probe.logged(session) if session.rank == 1 else []
    assert [line["step"] for line in lines] == list(range(FIRST, probe.steps())) * session.rank
    probe.end(session, model=model, optimizer=optimizer, lines=[line["loss"] for line in lines])
