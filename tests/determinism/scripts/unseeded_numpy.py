"""Noise of numpy's global generator, which nobody seeds."""

# quick
# verdict: NOT DETERMINISTIC
# cause: unseeded-rng
# says: numpy

import os

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("last.pt"):
    first, weights, rates = torch.load("last.pt")
    model.load_state_dict(weights)
    optimizer.load_state_dict(rates)
for step in range(first, 10):
    x = torch.as_tensor(np.random.rand(8, 4), dtype=torch.float32)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    torch.save((step + 1, model.state_dict(), optimizer.state_dict()), "last.pt")
