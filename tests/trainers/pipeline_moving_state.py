"""A stage whose forward moves a buffer that is not persistent, a frozen parameter, and a count that it warms up by."""

# verdict: same bits
# adaptive: refused
# worlds: 2

import probe
import torch
from torch import nn

import swift_ft


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.05)
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        return torch.tanh(self.fast(x - self.mean)) * min(1.0, self.calls / 40) + 0.1 * self.slow(x)


with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session, Moving)
    train_step = probe.usual_pass(session, schedule, optimizer)
    probe.run(session, train_step, module=module, optimizer=optimizer)
