"""The global generators of torch, numpy and Python in train_step (token masking, augmentation)."""

# verdict: same bits
# worlds: 1, 2

import random

import numpy as np
import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        x = x.masked_fill(torch.rand(x.shape) < 0.15, 0.0) * random.uniform(0.8, 1.2)
        x = x + torch.from_numpy(np.random.normal(0.0, 0.1, x.shape)).float()
        probe.descend(step, optimizer, nn.functional.mse_loss(model(x), y))

    probe.run(session, train_step, model=model, optimizer=optimizer)
