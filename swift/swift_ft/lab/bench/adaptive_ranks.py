"""A rank of `swift-ft bench adaptive`: a stage that takes a fixed time and computes almost nothing.

    adaptive_ranks.py SETTINGS    as JSON: stages, replicas, microbatches, numbers (elements of a stage's
                                  weight), unit_s, steps, settings (of the session), out

Writes the end time of each step to a file in `out`, by the machine's monotonic clock.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft
from swift_ft.lab.drill.model import paced

WIDTH = 8


class Paced(nn.Module):
    """Sleeps one unit in forward, one for the gradient of its input, and one for that of its weight. The first stage's
    input needs no gradient, and torch computes its whole backward with the weights, so these take two units there."""

    def __init__(self, unit_s: float, numbers: int, *, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numbers))
        self._unit_s = unit_s
        self._first = first

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._unit_s)
        if not self._first:
            x = paced(x, 0.0, self._unit_s)
        weight = paced(self.weight, 0.0, self._unit_s * (1 + self._first))
        return x * weight.view(WIDTH, -1).mean(1)


def main() -> None:
    given = json.loads(sys.argv[1])
    stages, steps = given["stages"], given["steps"]
    with swift_ft.Session.from_env(
        replicas=given["replicas"],
        strategy="adaptive",
        checkpoint_every=10**6,
        last_checkpoint=False,
        **given["settings"],
    ) as session:
        torch.manual_seed(session.pipeline_rank)
        number = session.pipeline_rank
        module = Paced(given["unit_s"], given["numbers"], first=number == 0)
        stage = session.pipeline_stage(module, number, stages)
        schedule = Schedule1F1B(
            stage,
            n_microbatches=given["microbatches"],
            loss_fn=lambda output, target: (output - target).square().mean(),
        )
        optimizer = session.optimizer(torch.optim.SGD(module.parameters(), lr=1e-6))
        session.register(schedule=schedule)
        over: dict[int, float] = {}

        def train_step(step: int) -> None:
            optimizer.zero_grad()
            batch = torch.full((given["microbatches"], WIDTH), float(step + session.dp_rank))
            last: dict[str, Any] = {"target": batch} if number == stages - 1 else {}
            schedule.step(*((batch,) if number == 0 else ()), **last)
            optimizer.step()
            over[step] = time.monotonic()

        session.run(train_step, num_steps=steps)
        Path(given["out"], f"{session.rank}.json").write_text(json.dumps(over))


if __name__ == "__main__":
    main()
