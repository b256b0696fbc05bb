"""Two stages, whose position in the data is not registered: `hidden.py STEPS`."""

import os
import sys

import torch
from stages import compute, prepare
from torch import nn

import swift_ft

STEPS = int(sys.argv[1])
WIDTH, BATCH = 16, 8

if __name__ == "__main__":
    session = swift_ft.Session.from_env(seed=5, log_queue_bytes=8 << 20, checkpoint_every=5)
    torch.manual_seed(session.pipeline_rank)
    schedule, optimizer = prepare(session, nn.Linear(WIDTH, WIDTH))
    position = 0

    def train_step(step: int) -> None:
        global position
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(position))
        position += 1
        optimizer.zero_grad()
        compute(session, schedule, x)
        optimizer.step()

    session.run(train_step, num_steps=STEPS)
    session.close()
    sys.stdout.flush()
    os._exit(0)
