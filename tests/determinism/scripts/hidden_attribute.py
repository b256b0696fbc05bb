"""A running scale of the loss, in a variable of the script that no checkpoint has."""

# verdict: DIFFERS
# cause: hidden-state
# says: rank 0: the loss

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first, scale = 0, 1.0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    first = saved["step"]
for step in range(first, 10):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss = model(x).pow(2).mean()
    scale = 0.9 * scale + 0.1 * loss.item()
    optimizer.zero_grad()
    (loss / scale).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "step": step + 1}, "last.pt")
