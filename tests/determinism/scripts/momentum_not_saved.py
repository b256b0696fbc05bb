"""The model is saved, the optimizer is not."""

# quick
# verdict: DIFFERS
# cause: optimizer-not-saved
# says: exp_avg: absent

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
first = 0
if os.path.exists("weights.pt"):
    saved = torch.load("weights.pt")
    model.load_state_dict(saved["weights"])
    first = saved["next"]
for step in range(first, 10):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    torch.save({"weights": model.state_dict(), "next": step + 1}, "weights.pt")
