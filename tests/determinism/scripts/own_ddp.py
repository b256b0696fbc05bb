"""DistributedDataParallel of its own, as torchrun starts it; rank 0 saves."""

# quick
# verdict: EQUAL
# ranks: 2

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 8):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    if rank == 0 and step % 2 == 1:
        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(saved, "new.pt")
        os.replace("new.pt", "last.pt")
    dist.barrier()
dist.destroy_process_group()
