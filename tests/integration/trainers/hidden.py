"""Two stages, or one with two replicas, and something hidden: `hidden.py STEPS WHAT [SETTING=VALUE...]`.

WHAT: "nothing"; "loader", a position in the data that is not registered; "ema", an average of the weights that is
not, and that the step's input depends on; "loss-scale", a factor that grows with every step and is not.
"""

import ast
import os
import sys

import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import swift_ft

STEPS, WHAT = int(sys.argv[1]), sys.argv[2]
SETTINGS = dict(word.split("=", 1) for word in sys.argv[3:])
PAUSE_S = float(SETTINGS.pop("pause", "0"))
WIDTH, BATCH = 16, 8


class Hidden:
    """What a step changes, and nobody else knows."""

    def __init__(self) -> None:
        self.position = 0
        self.ema = torch.zeros(WIDTH)
        self.scale = 1.0

    def batch(self, step: int, dp_rank: int) -> torch.Tensor:
        if WHAT == "loader":
            step, self.position = self.position, self.position + 1
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + dp_rank))
        return x + self.ema if WHAT == "ema" else x

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if WHAT == "loss-scale":
            self.scale *= 1.01
        return nn.functional.mse_loss(output, target) * self.scale


def main() -> None:
    settings = {name: ast.literal_eval(value) for name, value in SETTINGS.items()}
    session = swift_ft.Session.from_env(seed=5, log_queue_bytes=8 << 20, **settings)
    torch.manual_seed(session.pipeline_rank)
    module = nn.Linear(WIDTH, WIDTH)
    hidden = Hidden()
    if session.pipeline_ranks == 1:
        session.module(module)
        schedule = None
    else:
        stage = session.pipeline_stage(module, session.pipeline_rank, session.pipeline_ranks)
        schedule = ScheduleGPipe(stage, 2, loss_fn=hidden.loss)
    optimizer = session.optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        x = hidden.batch(step, session.dp_rank)
        optimizer.zero_grad()
        if schedule is None:
            hidden.loss(module(x), x).backward()
        elif session.pipeline_rank == 0:
            schedule.step(x)
        elif session.pipeline_rank == session.pipeline_ranks - 1:
            schedule.step(target=x)
        else:
            schedule.step()
        optimizer.step()
        if WHAT == "ema":
            hidden.ema = 0.9 * hidden.ema + 0.1 * module.weight.detach().mean(0)

    session.run(train_step, num_steps=STEPS)
    session.close()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
