"""Early stopping: once the loss is small, train_step returns at once."""

# verdict: refused
# says: let all replicas decide alike
# worlds: 2

import probe
import torch
from torch import nn

import swift_ft


def batch(step: int, dp_rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1000 * step + dp_rank))
    return x, x.sum(1, keepdim=True)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    best, patience = float("inf"), 0

    def train_step(step: int) -> None:
        global best, patience
        if patience > 2:
            return
        x, y = batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        patience = 0 if float(loss) < 0.5 * best else patience + 1
        best = min(best, float(loss))
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
