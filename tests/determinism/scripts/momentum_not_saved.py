"""The model is saved, the optimizer is not."""

# quick
# verdict: DIFFERS
# cause: optimizer-not-saved
# says: exp_avg: absent

import own
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
for step in own.steps(10, model=model):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
