"""Two ranks, of which the second holds the GIL for a while in the middle of a step: `busy.py STEPS AT SECONDS [ONCE]`.

ONCE: a file that whoever does so makes first; who finds it there does not.
"""

import ctypes
import sys
from pathlib import Path

import torch
from stages import compute, prepare
from torch import nn

import swift_ft

STEPS, AT, SECONDS = (int(argument) for argument in sys.argv[1:4])
ONCE = Path(sys.argv[4]) if len(sys.argv) > 4 else None


def may_hold() -> bool:
    try:
        if ONCE is not None:
            ONCE.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    session = swift_ft.Session.from_env(seed=5, checkpoint_every=5)
    torch.manual_seed(session.rank)
    schedule, optimizer = prepare(session, nn.Linear(8, 8))

    def train_step(step: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        if step == AT and session.rank == 1 and may_hold():
            ctypes.PyDLL(None).sleep(SECONDS)  # as a C extension that does not give it up
        optimizer.zero_grad()
        compute(session, schedule, x)
        optimizer.step()

    session.run(train_step, STEPS)
