"""The seed of torch's generator is taken from the system."""

# verdict: NOT DETERMINISTIC
# cause: unseeded-rng
# says: torch

import os

import torch
from torch import nn

torch.manual_seed(1)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.seed()
first = 0
if os.path.exists("model.pt"):
    saved = torch.load("model.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 10):
    x = torch.ones(8, 4)
    loss = nn.functional.dropout(model(x), 0.3).pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "model.pt"
    )
