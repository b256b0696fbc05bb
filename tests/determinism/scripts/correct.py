"""Checkpoints of its own that hold all of it: dropout, batch norm, a schedule, shuffled data."""

# quick
# verdict: EQUAL

import random
from pathlib import Path

import numpy as np
import torch
from torch import nn

STEPS, EVERY, BATCH = 12, 4, 8
CHECKPOINT = Path("checkpoint.pt")

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
first = 0

if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["random"])
    np.random.set_state(saved["numpy"])
    first = saved["step"]

for step in range(first, STEPS):
    epoch, place = divmod(step * BATCH, len(data))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    x = data[order[place : place + BATCH]] * random.choice([0.9, 1.0, 1.1]) + np.random.normal()
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if (step + 1) % EVERY == 0:
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "torch": torch.get_rng_state(),
            "random": random.getstate(),
            "numpy": np.random.get_state(),
            "step": step + 1,
        }
        torch.save(saved, CHECKPOINT)
