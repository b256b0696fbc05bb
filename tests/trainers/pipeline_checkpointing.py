"""Activation checkpointing and dropout in the stages."""

# verdict: same bits
# worlds: 2
# device

import probe
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.utils.checkpoint import checkpoint

import swift_ft


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


with swift_ft.Session.from_env(checkpoint_every=5) as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    torch.manual_seed(rank)
    module = Block().to(probe.device())
    stage = session.pipeline_stage(module, rank, ranks, probe.device())
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        x = x.to(probe.device())
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
