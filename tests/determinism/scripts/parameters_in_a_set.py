"""The optimizer gets its parameters in the order of a set; a checkpoint has their states by number."""

# verdict: DIFFERS
# cause: optimizer-not-saved
# says: that of optimizer 0.state
# interpreters

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcdefgh"})
names = {name for name, _ in model.named_parameters() if name.endswith("weight")}
named = dict(model.named_parameters())
optimizer = torch.optim.SGD([named[name] for name in names], lr=0.01, momentum=0.9)
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 6):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    for part in model.values():
        x = part(x)
    x.pow(2).mean().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "last.pt"
    )
