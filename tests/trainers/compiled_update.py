"""The optimizer's step in a function that torch.compile compiles, as in torch's tutorial."""

# verdict: same bits
# worlds: 2
# patience: 200

import probe
import torch

import swift_ft


def train_step(step: int) -> None:
    loss = probe.backward(session, model, optimizer, step)
    update()
    probe.note(step, loss)


@torch.compile(fullgraph=False, backend="aot_eager")
def update() -> None:
    optimizer.step()


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2)))
    probe.run(session, train_step, model=model, optimizer=optimizer)
