"""The global generators: torch.rand outside of the stages (token masking), numpy and Python inside of them."""

# verdict: same bits
# worlds: 2, 4
# quick

import random

import numpy as np
import probe
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

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
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    torch.manual_seed(rank)
    module = StochasticDepth()
    stage = session.pipeline_stage(module, rank, ranks)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        x = x.masked_fill(torch.rand(x.shape) < 0.15, 0.0)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=x.roll(1, 1), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        probe.note(step, losses)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, module=module, optimizer=optimizer)
