"""A GAN whose two networks are two calls of session.module."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft


def batch(step: int, dp_rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1000 * step + dp_rank))
    return x, x.sum(1, keepdim=True)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    d = session.module(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    g = session.module(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)))
    d_optimizer = session.optimizer(torch.optim.Adam(d.parameters(), lr=1e-2))
    g_optimizer = session.optimizer(torch.optim.Adam(g.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, _ = batch(step, session.dp_rank)
        z = torch.randn(16, 4)
        d_loss = nn.functional.softplus(-d(x)).mean() + nn.functional.softplus(d(g(z).detach())).mean()
        g_loss = nn.functional.softplus(-d(g(z))).mean()
        d_optimizer.zero_grad()
        g_optimizer.zero_grad()
        g_loss.backward()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_optimizer.step()
        probe.note(step, d_loss, g_loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, d=d, g=g, d_optimizer=d_optimizer, g_optimizer=g_optimizer)
