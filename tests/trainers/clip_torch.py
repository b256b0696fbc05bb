"""torch.nn.utils.clip_grad_norm_, as everybody writes it."""

# verdict: same bits
# worlds: 1, 2
# device

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        loss = probe.backward(session, model, optimizer, step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        probe.note(step, loss, norm)

    probe.run(session, train_step, model=model, optimizer=optimizer)
