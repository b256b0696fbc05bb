"""A restart does its epoch to the end once more, and so more steps in all."""

# verdict: DIFFERS
# cause: data-position

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epoch = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    epoch = saved["epoch"]
while epoch < 3:
    for place in range(4):
        seed = 100 * epoch + place
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
    epoch += 1
