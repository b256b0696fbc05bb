"""LBFGS with a closure: it evaluates several times before it has its step."""

# verdict: same bits
# worlds: 1, 2
# plain: 1

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
