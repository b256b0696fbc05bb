"""A running mean in a buffer that is registered with persistent=False."""

# quick
# verdict: DIFFERS
# cause: buffer-not-saved
# says: persistent=False

import own
import torch
from torch import nn


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x - self.mean)


torch.manual_seed(0)
model = Centred()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in own.steps(10, model=model):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
