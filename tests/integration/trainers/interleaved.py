"""Two ranks with two stages each: `interleaved.py STEPS PAUSE_S FILE EVERY GROUPS`.

They make no pauses in a replay, nor once that file is there.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

import swift_ft

STEPS, PAUSE_S, IN_HASTE = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
EVERY, GROUPS = int(sys.argv[4]), sys.argv[5]
RANKS, STAGES, WIDTH, BATCH = 2, 4, 16, 8

if __name__ == "__main__":
    session = swift_ft.Session.from_env(seed=5, checkpoint_every=EVERY, groups=GROUPS)
    torch.manual_seed(session.rank)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES // RANKS)]
    stages = [
        session.pipeline_stage(module, session.rank + RANKS * index, STAGES)
        for index, module in enumerate(modules)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = session.optimizer(torch.optim.SGD(parameters, lr=0.1))

    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        if session.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        optimizer.step()
        if not (session.replaying or IN_HASTE.exists()):
            time.sleep(PAUSE_S)

    session.run(train_step, num_steps=STEPS)
    session.close()
