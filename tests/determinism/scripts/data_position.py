"""A restart begins with the first batch of the epoch again."""

# quick
# verdict: DIFFERS
# cause: data-position
# says: the value of step 0

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
features = torch.randn(80, 3)
loader = DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8)
done = 0
if os.path.exists("save.pt"):
    save = torch.load("save.pt")
    model.load_state_dict(save["model"])
    optimizer.load_state_dict(save["optimizer"])
    done = save["done"]
batches = iter(loader)
while done < 10:
    x, y = next(batches)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    done += 1
    if done % 2 == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}, "save.pt"
        )
