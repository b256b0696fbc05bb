"""A stage with a codebook of 128 KiB in a buffer, which the forward moves by .data."""

# verdict: same bits
# worlds: 2
# adaptive: refused

import probe
import torch
from torch import nn

import swift_ft


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(4096, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            nearest = torch.cdist(y, self.codes).argmin(1)
            self.codes.data.mul_(0.99)
            self.codes.data[nearest] += 0.1 * y
        return y + self.codes[nearest]


with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session, Quantised)
    train_step = probe.usual_pass(session, schedule, optimizer)
    probe.run(session, train_step, module=module, optimizer=optimizer)
