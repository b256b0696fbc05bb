"""A running scale of the loss, in a variable of the script that no checkpoint has."""

# verdict: DIFFERS
# cause: hidden-state
# says: rank 0: the loss

import own
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scale = 1.0
for step in own.steps(10, model=model):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss = model(x).pow(2).mean()
    scale = 0.9 * scale + 0.1 * loss.item()
    optimizer.zero_grad()
    (loss / scale).backward()
    optimizer.step()
