"""A generator of the script's own, without a seed."""

# verdict: NOT DETERMINISTIC
# cause: unseeded-rng
# says: of the script's own

import os

import numpy as np
import torch
from torch import nn

torch.manual_seed(1)
own = np.random.default_rng()
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("model.pt"):
    saved = torch.load("model.pt")
    model.load_state_dict(saved["model"])
    first = saved["step"]
for step in range(first, 10):
    x = torch.as_tensor(own.normal(size=(8, 4)), dtype=torch.float32)
    optimizer.zero_grad()
    model(x).pow(2).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "step": step + 1}, "model.pt")
