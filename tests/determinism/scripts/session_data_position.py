"""An iterator over the data that the session does not know."""

# verdict: DIFFERS
# cause: data-position
# ranks: 1
# session
# strategy: checkpoint

import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=4) as session:
    torch.manual_seed(0)
    model = session.module(nn.Linear(8, 1))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches = iter(torch.randn(40, 16, 8))

    def train_step(step):
        loss = model(next(batches)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    session.run(train_step, num_steps=12)
