"""A module that counts its calls in a dataclass and warms up by them."""

# verdict: named inexact
# worlds: 1, 2
# says: output 0 of the module in its forward

from dataclasses import dataclass

import probe
import torch
from torch import nn

import swift_ft


@dataclass
class Progress:
    calls: int = 0
    seen: float = 0.0


class Warm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)
        self.progress = Progress()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.progress.calls += 1
            self.progress.seen += len(x)
        return self.second(torch.tanh(self.first(x))) * min(1.0, self.progress.calls / 8)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Warm())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, model, optimizer), model=model, optimizer=optimizer)
