"""Contrastive learning with the negatives of all replicas: a Function around dist.all_gather and all_reduce."""

# verdict: same bits
# worlds: 2

from typing import Any

import probe
import torch
import torch.distributed as dist
from torch import nn

import swift_ft


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = torch.stack(gradients)
        dist.all_reduce(total)
        return total[dist.get_rank()]


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(8, 8)
        queries = nn.functional.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        keys = torch.cat(Gather.apply(nn.functional.normalize(model(x), dim=1)))
        loss = nn.functional.cross_entropy(queries @ keys.T / 0.3, torch.arange(8) + 8 * session.dp_rank)
        probe.descend(step, optimizer, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
