"""Two ranks that fill the log's queue in a few steps, and do not wait for it: `dropping.py STEPS PAUSE_S FILE`.

They make no more pauses once that file is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import swift_ft

STEPS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2])
IN_HASTE = Path(sys.argv[3])
WIDTH, BATCH = 256, 128  # 128 KiB a step in each direction, and as much of inputs or targets

if __name__ == "__main__":
    session = swift_ft.Session.from_env(
        seed=5, checkpoint_every=1_000_000, log_queue_bytes=1 << 20, log_when_full="drop"
    )
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
        if not IN_HASTE.exists():
            time.sleep(PAUSE_S)

    session.run(train_step, num_steps=STEPS)
    session.close()
    # As the drill's trainer: taking an interpreter with torch apart takes a second, on all ranks at once.
    sys.stdout.flush()
    os._exit(0)
