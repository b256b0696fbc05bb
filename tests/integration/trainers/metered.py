"""Two pipeline ranks that stand still before their last step until a file is there: `metered.py STEPS FILE`."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.pipelining import ScheduleGPipe

import swift_ft

STEPS, GO = int(sys.argv[1]), Path(sys.argv[2])


def main() -> None:
    with swift_ft.Session.from_env(checkpoint_every=4) as session:
        rank = session.rank
        module = torch.nn.Linear(4, 4)
        stage = session.pipeline_stage(module, rank, 2)
        schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
        optimizer = session.optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
        session.register(schedule=schedule)

        def train_step(step: int) -> None:
            while step == STEPS - 1 and not GO.exists() and os.getppid() > 1:
                time.sleep(0.01)
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(torch.ones(4, 4))
            else:
                schedule.step(target=torch.zeros(4, 4))
            optimizer.step()

        session.run(train_step, num_steps=STEPS)


main()
