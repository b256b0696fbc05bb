"""A cache of rotary tables that is made in the first forward and grows, not persistent."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)
        self.register_buffer("table", torch.empty(0, 16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) < len(x):
            self.table = torch.cos(torch.arange(len(x))[:, None] * torch.arange(16) / 16)
        return self.second(torch.tanh(self.first(x)) * self.table[: len(x)])


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Rotary())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank, 4 + step)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
