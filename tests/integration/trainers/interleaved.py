"""Two ranks with two stages each: `interleaved.py STEPS`."""

import sys

import torch
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

import swift_ft

RANKS, STAGES, WIDTH, BATCH = 2, 4, 16, 8

if __name__ == "__main__":
    with swift_ft.Session.from_env(checkpoint_every=5) as session:
        modules = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES // RANKS))
        stages = [
            session.pipeline_stage(module, session.rank + RANKS * index, STAGES)
            for index, module in enumerate(modules)
        ]
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
        optimizer = session.optimizer(torch.optim.SGD(modules.parameters(), lr=0.1))
        session.register(schedule=schedule)

        def train_step(step: int) -> None:
            x = torch.ones(BATCH, WIDTH)
            optimizer.zero_grad()
            schedule.step(*([x] if session.rank == 0 else []), **({} if session.rank == 0 else {"target": x}))
            optimizer.step()

        session.run(train_step, num_steps=int(sys.argv[1]))
