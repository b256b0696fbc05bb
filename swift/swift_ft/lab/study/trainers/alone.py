"""The weights of a cell by one process that knows of no failure, no launcher and no swift: plain torch.

It is given the steps in which fewer replicas had a part (`origins`), and writes what it has found to `alone.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from swift_ft.lab.bench.marks import digest_of
from swift_ft.lab.study.settings import RANKS
from swift_ft.lab.study.trainers import tasks


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    origins = {int(step): ranks for step, ranks in given["fewer"]}
    torch.set_num_threads(1)
    task = tasks.make(given["task"])
    torch.manual_seed(given["seed"])
    model = task.model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=task.lr)
    for step in range(given["steps"]):
        ranks = origins.get(step, range(RANKS))
        losses = [task.loss(model, tasks.batch_of(task, given["seed"], step, rank)) for rank in ranks]
        gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
        for parameter, *parts in zip(parameters, *gradients, strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            parameter.grad = total / len(parts)
        optimizer.step()
    found = {"digest": digest_of(model), "measured": task.measured(model)}
    Path(given["directory"], "alone.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
