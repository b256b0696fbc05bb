"""Only the parameters are saved, so that batch norm begins with new running statistics."""

# verdict: DIFFERS
# cause: buffer-not-saved
# says: running_mean: the value of step 0

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[name])
    first = saved["step"]
for step in range(first, 10):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    torch.save({**dict(model.named_parameters()), "step": step + 1}, "last.pt")
