"""Half of the layers in bfloat16, half in float32, one scale in float64."""

# verdict: same bits
# worlds: 1, 2
# plain: 1, 2

import probe
import torch
from torch import nn

import swift_ft


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 16).bfloat16()
        self.high = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.low(x.bfloat16())).float()
        return (self.high(hidden).double() * self.scale).float()


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Mixed())
    optimizer = session.optimizer(torch.optim.RAdam(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, model, optimizer), model=model, optimizer=optimizer)
