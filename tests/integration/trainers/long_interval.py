"""Two ranks whose interval between checkpoints is longer than the run: `long_interval.py STEPS PAUSE_S FILE`; or as
long as a fourth argument says.

They make no pauses in a replay, nor once that file is there.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import swift_ft

STEPS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2])
IN_HASTE = Path(sys.argv[3])
EVERY = int(sys.argv[4]) if len(sys.argv) > 4 else 1_000_000
WIDTH, BATCH = 64, 16

if __name__ == "__main__":
    session = swift_ft.Session.from_env(seed=5, checkpoint_every=EVERY)
    torch.manual_seed(session.rank)
    module = nn.Linear(WIDTH, WIDTH)
    stage = session.adopt(PipelineStage(module, session.rank, 2, torch.device("cpu")))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.SGD(module.parameters(), lr=0.1))

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
