"""Two replicas of a whole model under torchrun: the same training, without any recovery."""

import json
import sys

import torch
import torch.distributed as dist

from swift_ft.lab.bench.marks import mark
from swift_ft.lab.study.settings import RANKS
from swift_ft.lab.study.trainers import tasks


def main() -> None:
    given = json.loads(sys.argv[1])
    task = tasks.make(given["task"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(given["seed"])
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    mark(given["directory"], "begun", rank=rank)
    for step in range(given["steps"]):
        optimizer.zero_grad()
        loss = task.loss(model, tasks.batch_of(task, given["seed"], step, rank))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= RANKS
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        mark(given["directory"], "stepped", rank=rank, step=step, parts=list(range(RANKS)))
    tasks.mark_end(given["directory"], rank, model, task)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
