"""Weights tied across stages by all_reduce of their gradients: a plain one, and session.all_reduce."""

# verdict: same bits
# worlds: 2

import probe
import torch
import torch.distributed as dist
from torch import nn

import swift_ft


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale + self.shift


with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session, Scaled)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, probe.batch(step, session.dp_rank)[0])
        dist.all_reduce(module.scale.grad)
        module.shift.grad = session.all_reduce(module.shift.grad, "shift")
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)
