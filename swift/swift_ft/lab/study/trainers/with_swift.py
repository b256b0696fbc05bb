"""Two replicas of a whole model under `swift-ft run`; the strategy is the launcher's.

Who had a part in a step is asked of the reduction itself: each rank has a gradient of its own beside the model's
(`Parts`), and what the mean has of it says whose batches are in.
"""

import json
import sys
from typing import Any

import torch
from torch import nn

import swift_ft
from swift_ft.lab.bench.marks import mark
from swift_ft.lab.study.settings import RANKS
from swift_ft.lab.study.trainers import tasks


class Parts(nn.Module):
    """[RANKS]; rank r's own gradient is 1 at r and 0 elsewhere. It is not trained: its rate is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = nn.Parameter(torch.zeros(RANKS))


def main() -> None:
    given = json.loads(sys.argv[1])
    directory, task = given["directory"], tasks.make(given["task"])
    session = swift_ft.Session.from_env(replicas=RANKS, checkpoint_every=given["checkpoint_every"])
    torch.manual_seed(given["seed"])
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
        loss = task.loss(model, tasks.batch_of(task, given["seed"], step, session.dp_rank))
        loss.backward()  # type: ignore[no-untyped-call]
        parts.ranks.grad = nn.functional.one_hot(torch.tensor(session.dp_rank), RANKS).float()
        optimizer.step()
        assert parts.ranks.grad is not None
        there = parts.ranks.grad.nonzero().flatten().tolist()
        mark(directory, "stepped", rank=session.dp_rank, step=step, parts=there)

    mark(directory, "begun", rank=rank)
    session.run(train_step, num_steps=given["steps"])
    tasks.mark_end(directory, rank, model, task)
    session.close()


if __name__ == "__main__":
    main()
