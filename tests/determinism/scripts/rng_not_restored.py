"""Dropout after a restart draws what it drew in the first steps: the generator's state is not in the checkpoint."""

# quick
# verdict: DIFFERS
# cause: rng-not-restored
# says: generator torch: the value of step 0

import os

import torch
from torch import nn

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
first = 0
if os.path.exists("c.pt"):
    c = torch.load("c.pt")
    model.load_state_dict(c["model"])
    optimizer.load_state_dict(c["optimizer"])
    first = c["step"]
for step in range(first, 12):
    loss = (model(x + step) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 2:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "c.pt"
        )
