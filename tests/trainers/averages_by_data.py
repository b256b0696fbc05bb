"""Averages of a GAN's networks by .data, of which torch's version counters say nothing: one of them from step 6 on."""

# verdict: same bits
# worlds: 1, 2
# kills: tail, tail, tail

import copy

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    d = session.module(nn.Sequential(nn.Linear(8, 2048), nn.LeakyReLU(0.2), nn.Linear(2048, 1)))
    g = session.module(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)))
    d_slow = session.module(copy.deepcopy(d).requires_grad_(False))
    g_slow = session.module(copy.deepcopy(g).requires_grad_(False))
    d_optimizer = session.optimizer(torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.999)))
    g_optimizer = session.optimizer(torch.optim.Adam(g.parameters(), lr=1e-2, betas=(0.5, 0.999)))
    bce = nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)

    def average(slow: nn.Module, fast: nn.Module) -> None:
        for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
            old.data.mul_(0.9).add_(new.data, alpha=0.1)

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
        average(d_slow, d)
        if step >= 6:
            average(g_slow, g)
        probe.note(step, d_loss, g_loss)

    probe.run(session, train_step, d=d, g=g, d_slow=d_slow, g_slow=g_slow)
