"""An RNN whose hidden state is carried over steps in a plain attribute, the same on all replicas."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 16)
        self.head = nn.Linear(16, 1)
        self.hidden = torch.zeros(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.cell(x, self.hidden.detach())
        return self.head(self.hidden)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Recurrent())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, 0)
        probe.descend(step, optimizer, nn.functional.mse_loss(model(x), y))

    probe.run(session, train_step, model=model, optimizer=optimizer)
