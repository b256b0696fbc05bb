"""The global generators: torch.rand outside of the stages (token masking), numpy and Python inside of them."""

# verdict: same bits
# worlds: 2, 4
# quick

import random

import numpy as np
import probe
import torch
from torch import nn

import swift_ft


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(np.random.standard_normal(tuple(x.shape))).float()
        x = torch.tanh(self.first(x)) + 0.1 * noise
        return x + self.second(x) if random.random() < 0.7 else x + 0.0 * self.second(x)


with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session, StochasticDepth)

    def train_step(step: int) -> None:
        x, _ = probe.batch(step, session.dp_rank)
        x = x.masked_fill(torch.rand(x.shape) < 0.15, 0.0)
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, x)
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)
