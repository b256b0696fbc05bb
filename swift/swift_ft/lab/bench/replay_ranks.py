"""The trainer of `swift-ft bench replay`: stages that take a fixed time per microbatch, independent of the cores.

Run by the launcher: ``replay_ranks.py STAGES MICROBATCHES STEPS WIDTH FORWARD_S HELPERS GROUPS``
"""

import os
import sys

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft
from swift_ft.lab.drill.model import paced

BACKWARD = 2
"""Backward time over forward time: backward computes two products of that size."""


class Stage(nn.Module):
    """A stage, [1, WIDTH] -> [1, WIDTH], with WIDTH squared parameters and hardly any computation."""

    def __init__(self, width: int, forward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(paced(self.linear(x), self.forward_s, BACKWARD * self.forward_s))


def main(argv: list[str]) -> None:
    stages, microbatches, steps, width, helpers = (int(argv[i]) for i in (0, 1, 2, 3, 5))
    forward_s, groups = float(argv[4]), argv[6]
    with swift_ft.Session.from_env(
        seed=1, checkpoint_every=1_000_000, helpers=helpers, groups=groups
    ) as session:
        module = Stage(width, forward_s)
        stage = session.pipeline_stage(module, session.rank, stages)
        schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)
        optimizer = session.optimizer(torch.optim.SGD(module.parameters(), lr=0.01))
        session.register(schedule=schedule)
        session.help_replay(lambda _index: Stage(width, forward_s))

        def train_step(step: int) -> None:
            batch = torch.randn(microbatches, width, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            if session.rank == 0:
                schedule.step(batch)
            elif session.rank == stages - 1:
                schedule.step(target=batch, return_outputs=False)
            else:
                schedule.step()
            optimizer.step()

        session.run(train_step, num_steps=steps)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
