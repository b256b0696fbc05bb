"""bfloat16 stages with float32 inputs and loss."""

# verdict: same bits
# worlds: 2
# device

import probe
import torch
from torch import nn

import swift_ft


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.bfloat16()))


with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session, Low)

    def train_step(step: int) -> None:
        x, _ = probe.batch(step, session.dp_rank)
        x = x.to(probe.device(), torch.bfloat16)
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, x)
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)
