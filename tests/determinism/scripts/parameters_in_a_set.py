"""The optimizer gets its parameters in the order of a set; a checkpoint has their states by number."""

# verdict: DIFFERS
# cause: optimizer-not-saved
# says: that of optimizer 0.state
# interpreters

import own
import torch
from torch import nn

torch.manual_seed(0)
model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcdefgh"})
names = {name for name, _ in model.named_parameters() if name.endswith("weight")}
named = dict(model.named_parameters())
optimizer = torch.optim.SGD([named[name] for name in names], lr=0.01, momentum=0.9)
for step in own.steps(6, model=model, optimizer=optimizer):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    for part in model.values():
        x = part(x)
    x.pow(2).mean().backward()
    optimizer.step()
