"""Two ranks, of which the second holds the GIL for a while in the middle of a step: `busy.py STEPS AT SECONDS`."""

import ctypes
import sys

import torch
from stages import compute, prepare
from torch import nn

import swift_ft

STEPS, AT, SECONDS = (int(argument) for argument in sys.argv[1:4])

if __name__ == "__main__":
    session = swift_ft.Session.from_env(seed=5, checkpoint_every=5)
    torch.manual_seed(session.rank)
    schedule, optimizer = prepare(session, nn.Linear(8, 8))

    def train_step(step: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        if step == AT and session.rank == 1:
            ctypes.PyDLL(None).sleep(SECONDS)  # as a C extension that does not give it up
        optimizer.zero_grad()
        compute(session, schedule, x)
        optimizer.step()

    session.run(train_step, STEPS)
