"""Weights are saved with half their bits."""

# verdict: DIFFERS
# cause: parameters-not-saved
# says: in no step of the uninterrupted run

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    first = saved["step"]
for step in range(first, 10):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    halves = {name: value.bfloat16() for name, value in model.state_dict().items()}
    torch.save({"model": halves, "step": step + 1}, "last.pt")
