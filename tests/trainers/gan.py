"""A GAN: two networks by two calls of session.module, two optimizers, D's step before G's backward."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    d = session.module(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    g = session.module(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)))
    d_optimizer = session.optimizer(torch.optim.Adam(d.parameters(), lr=1e-2, betas=(0.5, 0.999)))
    g_optimizer = session.optimizer(torch.optim.Adam(g.parameters(), lr=1e-2, betas=(0.5, 0.999)))
    bce = nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)

    def train_step(step: int) -> None:
        x, _ = probe.batch(step, session.dp_rank)
        z = torch.randn(16, 4)
        d_optimizer.zero_grad()
        d_loss = bce(d(x), ones) + bce(d(g(z).detach()), zeros)
        d_loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = bce(d(g(z)), ones)
        g_loss.backward()
        g_optimizer.step()
        probe.note(step, d_loss, g_loss)

    probe.run(session, train_step, d=d, g=g, d_optimizer=d_optimizer, g_optimizer=g_optimizer)
