"""A running mean of the loss in a list that is not registered."""

# verdict: DIFFERS
# cause: hidden-state
# ranks: 2
# session
# strategy: checkpoint

import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=2, checkpoint_every=4) as session:
    torch.manual_seed(0)
    model = session.module(nn.Linear(8, 1))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scale = [1.0]

    def train_step(step):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        scale[0] = 0.9 * scale[0] + 0.1 * loss.item()
        optimizer.zero_grad()
        (loss / scale[0]).backward()
        optimizer.step()

    session.run(train_step, num_steps=12)
