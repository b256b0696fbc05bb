"""MoCo: a momentum encoder that the forward moves, and a queue of keys in a buffer."""

# verdict: same bits
# worlds: 1, 2

import copy

import probe
import torch
from torch import nn

import swift_ft


class MoCo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(32, 4), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        q = nn.functional.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            k = nn.functional.normalize(self.key(other), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], dim=1)
        with torch.no_grad():
            at = int(self.place)
            self.queue[at : at + 16] = k
            self.place[0] = (at + 16) % 32
        return nn.functional.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(MoCo())
    optimizer = session.optimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    )

    def train_step(step: int) -> None:
        x, _ = probe.batch(step, 0)
        probe.descend(step, optimizer, model(x + 0.01 * torch.randn_like(x), x))

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
