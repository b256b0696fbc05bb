"""Two replicas whose updates are applied while backward runs."""

# verdict: EQUAL
# ranks: 2
# session
# strategy: auto

import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=2, checkpoint_every=4, updates="wait_free") as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + session.dp_rank))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    session.run(train_step, num_steps=12)
