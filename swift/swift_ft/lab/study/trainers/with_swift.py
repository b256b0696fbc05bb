"""Two replicas of a whole model under `swift-ft run`; the strategy is the launcher's.

Who had a part in a step is asked of the reduction itself: each rank has a gradient of its own beside the model's
(`Parts`), and what the mean has of it says whose batches are in.
"""

from typing import Any

import torch
from torch import nn

import swift_ft
from swift_ft.lab.study.settings import RANKS
from swift_ft.lab.study.trainers import tasks
from swift_ft.lab.study.trainers.arguments import Told


class Parts(nn.Module):
    """[RANKS]; rank r's own gradient is 1 at r and 0 elsewhere. It is not trained: its rate is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = nn.Parameter(torch.zeros(RANKS))

    def capture(self, rank: int) -> None:
        """(before the reduction)"""
        self.ranks.grad = nn.functional.one_hot(torch.tensor(rank), RANKS).float()

    def told(self) -> list[int]:
        """(after it) The ranks whose gradients are in the mean."""
        assert self.ranks.grad is not None
        found: list[int] = self.ranks.grad.nonzero().flatten().tolist()
        return found


def main() -> None:
    told = Told.given()
    task = tasks.make(told.task)
    session = swift_ft.Session.from_env(replicas=RANKS, checkpoint_every=told.checkpoint_every)
    torch.manual_seed(told.seed)
    model = session.module(task.model())
    parts = Parts()
    session.module(parts)
    groups: list[dict[str, Any]] = [
        {"params": model.parameters()},
        {"params": parts.parameters(), "lr": 0.0},
    ]
    optimizer = session.optimizer(torch.optim.AdamW(groups, lr=task.lr))
    rank = session.dp_rank

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        loss = task.loss(model, tasks.batch_of(task, told.seed, step, session.dp_rank))
        loss.backward()  # type: ignore[no-untyped-call]
        parts.capture(session.dp_rank)
        optimizer.step()
        told.stepped(session.dp_rank, step, loss.item(), parts.told())

    told.tell("begun", rank)
    session.run(train_step, num_steps=told.steps)
    told.ended(rank, model, task.measured(model))
    session.close()


if __name__ == "__main__":
    main()
