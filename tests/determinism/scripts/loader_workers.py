"""Transforms that are modules, in a loader's workers."""

# quick
# verdict: EQUAL

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(nn.Module):
    def forward(self, x):
        return 2 * x


class Data(Dataset):
    def __init__(self):
        self.transform = Noisy()

    def __len__(self):
        return 16

    def __getitem__(self, n):
        return self.transform(torch.full((4,), float(n)))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    first = 0
    if os.path.exists("last.pt"):
        saved = torch.load("last.pt")
        model.load_state_dict(saved["model"])
        first = saved["step"]
    for step in range(first, 6):
        seeds = torch.Generator().manual_seed(step)
        *_, x = DataLoader(Data(), batch_size=8, num_workers=2, generator=seeds)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "step": step + 1}, "last.pt")
