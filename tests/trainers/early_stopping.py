"""Early stopping by session.stop, behind the update, once the loss of all replicas has grown for good."""

# verdict: same bits
# worlds: 1, 2
# steps: 16

import probe
import torch
import torch.distributed as dist
from torch import nn

import swift_ft


def batch(step: int, dp_rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1000 * step + dp_rank))
    return x, x.sum(1, keepdim=True) * (1 if step < 9 else 3)


class Patience:
    """Two steps in a row with a loss far above the best one are too many."""

    def __init__(self) -> None:
        self.best, self.waited = float("inf"), 0

    def is_over(self, loss: float) -> bool:
        self.waited = 0 if loss < 4 * self.best else self.waited + 1
        self.best = min(self.best, loss)
        return self.waited == 2

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best, self.waited = state["best"], int(state["waited"])


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    patience = Patience()
    session.register(patience=patience)

    def train_step(step: int) -> None:
        x, y = batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if patience.is_over(float(total)):
            session.stop("the loss grows")
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    assert session.step == 11, session.step
    probe.end(session, model=model, optimizer=optimizer, patience=patience)
