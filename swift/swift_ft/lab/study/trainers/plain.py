"""Two replicas of a whole model under torchrun: the same training, without any recovery."""

import torch
import torch.distributed as dist

from swift_ft.lab.study.settings import RANKS
from swift_ft.lab.study.trainers import tasks
from swift_ft.lab.study.trainers.arguments import Told


def main() -> None:
    told = Told.given()
    task = tasks.make(told.task)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(told.seed)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    told.tell("begun", rank)
    for step in range(told.steps):
        optimizer.zero_grad()
        loss = task.loss(model, tasks.batch_of(task, told.seed, step, rank))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= RANKS
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        told.stepped(rank, step, loss.item(), range(RANKS))
    told.ended(rank, model, task.measured(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
