"""Complex weights under Adam, which steps their real view; a complex buffer that a forward changes."""

# verdict: same bits
# plain: 1

import probe
import torch
from torch import nn

import swift_ft


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.out = nn.Linear(8, 1)
        self.register_buffer("phase", torch.zeros(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.fft.fft(x) * self.filter
        self.phase = 0.9 * self.phase + 0.1 * self.filter.detach()
        return self.out(torch.fft.ifft(seen + 0.01 * self.phase).real)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Net())
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, model, optimizer), model=model, optimizer=optimizer)
