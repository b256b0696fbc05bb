"""Early stopping by session.stop, by each replica's own loss."""

# verdict: refused
# says: let all replicas decide alike
# worlds: 2

import probe
import torch
from torch import nn

import swift_ft


def batch(step: int, dp_rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1000 * step + dp_rank))
    return x, x.sum(1, keepdim=True) * (1 if step < 9 or dp_rank == 0 else 3)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        if float(loss) > 30:
            session.stop()
        probe.descend(step, optimizer, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
