"""After a restart another number of threads: the shares of a batch are others."""

# quick
# verdict: DIFFERS
# cause: thread-count
# says: threads: 3 uninterrupted, 1 otherwise

import os

import torch
from torch import nn

resumed = os.path.exists("last.pt")
torch.set_num_threads(1 if resumed else 3)
torch.manual_seed(0)
model = nn.Linear(64, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first = 0
if resumed:
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 10):
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(step))
    shares = [share.pow(2).mean() for share in model(x).chunk(torch.get_num_threads())]
    loss = sum(shares) / len(shares)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "last.pt"
    )
