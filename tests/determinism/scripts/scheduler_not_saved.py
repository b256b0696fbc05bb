"""The warm-up of the learning rate begins again after a restart."""

# quick
# verdict: DIFFERS
# cause: scheduler-not-saved
# says: lr

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for group in optimizer.param_groups:
    group.pop("initial_lr", None)
    group["lr"] = 0.1
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
for step in range(first, 10):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    scheduler.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "last.pt"
    )
