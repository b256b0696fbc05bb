"""After a restart another number of threads: the shares of a batch are others."""

# quick
# verdict: DIFFERS
# cause: thread-count
# says: threads: 3 uninterrupted, 1 otherwise

import os

import own
import torch
from torch import nn

resumed = os.path.exists("last.pt")
torch.set_num_threads(1 if resumed else 3)
torch.manual_seed(0)
model = nn.Linear(64, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in own.steps(10, model=model, optimizer=optimizer):
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(step))
    shares = [share.pow(2).mean() for share in model(x).chunk(torch.get_num_threads())]
    loss = sum(shares) / len(shares)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
