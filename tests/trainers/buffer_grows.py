"""A memory bank in a buffer that grows until it is full; an integer buffer that a decay turns into a float."""

# verdict: same bits
# worlds: 1, 2
# quick

import probe
import torch
from torch import nn

import swift_ft


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.register_buffer("bank", torch.zeros(0, 4))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = nn.functional.normalize(self.encoder(x), dim=1)
        near = (keys * keys.flip(0)).sum(1, keepdim=True)
        logits = torch.cat([near, keys @ self.bank.T], 1) / 0.2
        self.bank = torch.cat([self.bank, keys.detach()])[-70:]
        self.seen = self.seen * 0.9 + len(x) / 8
        return logits * (1 + self.seen / 100)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Net())
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        probe.descend(
            step, optimizer, nn.functional.cross_entropy(model(x), torch.zeros(16, dtype=torch.long))
        )

    probe.run(session, train_step, model=model, optimizer=optimizer)
