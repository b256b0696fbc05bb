"""Augmentation by Python's random, which nobody seeds."""

# quick
# verdict: NOT DETERMINISTIC
# cause: unseeded-rng
# says: random

import random
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
opt = torch.optim.Adam(net.parameters())
data = torch.randn(40, 6)
labels = torch.randint(0, 2, (40,))
saves = sorted(Path(".").glob("step*.pt"))
start = 0
if saves:
    state = torch.load(saves[-1])
    net.load_state_dict(state["net"])
    opt.load_state_dict(state["opt"])
    start = state["step"]
for step in range(start, 10):
    picked = random.sample(range(40), 8)
    loss = nn.functional.cross_entropy(net(data[picked]), labels[picked])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 2 == 1:
        state = {"net": net.state_dict(), "opt": opt.state_dict(), "step": step + 1}
        torch.save(state, f"step{step:03}.pt")
