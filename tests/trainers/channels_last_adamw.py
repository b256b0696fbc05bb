"""A channels_last convolution net under AdamW(fused=True)."""

# verdict: same bits
# worlds: 1, 2
# plain: 1

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(72, 4)
    )
    model = session.module(model.to(memory_format=torch.channels_last))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))

    def train_step(step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + session.dp_rank)
        x = torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        probe.descend(step, optimizer, nn.functional.cross_entropy(model(x), torch.arange(4)))

    probe.run(session, train_step, model=model, optimizer=optimizer)
