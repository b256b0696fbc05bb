"""Correct, though nobody seeds numpy and random, and a note is drawn from random in each step."""

# quick
# verdict: EQUAL
# says: random begin with other states

import random

import own
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in own.steps(10, model=model):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    print(random.choice(["on", "onward", "further"]))
