"""Two replicas of a whole model under `swift-ft run`; the strategy is the launcher's."""

import torch

import swift
from swift.study.settings import RANKS
from swift.study.trainers import tasks
from swift.study.trainers.told import Told


def main() -> None:
    told = Told.given()
    task = tasks.make(told.task)
    session = swift.Session.from_env(replicas=RANKS, checkpoint_every=told.checkpoint_every)
    torch.manual_seed(told.seed)
    model = session.module(task.model())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=task.lr))
    rank = session.dp_rank

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        loss = task.loss(model, tasks.batch_of(task, told.seed, step, session.dp_rank))
        loss.backward()  # type: ignore[no-untyped-call]
        told.computed(session.dp_rank, step)
        optimizer.step()
        told.stepped(session.dp_rank, step, loss.item())

    told.tell("begun", rank)
    session.run(train_step, num_steps=told.steps)
    told.ended(rank, model, task.measured(model))
    session.close()


if __name__ == "__main__":
    main()
