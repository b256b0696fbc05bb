"""Two pipeline ranks that stand still before their last step until a file is there: `metered.py STEPS FILE`."""

import os
import sys
import time
from pathlib import Path

import torch
from stages import compute, prepare

import swift_ft

STEPS, GO = int(sys.argv[1]), Path(sys.argv[2])


def main() -> None:
    with swift_ft.Session.from_env(checkpoint_every=4) as session:
        schedule, optimizer = prepare(session, torch.nn.Linear(4, 4))

        def train_step(step: int) -> None:
            while step == STEPS - 1 and not GO.exists() and os.getppid() > 1:
                time.sleep(0.01)
            optimizer.zero_grad()
            compute(session, schedule, torch.ones(4, 4))
            optimizer.step()

        session.run(train_step, num_steps=STEPS)


main()
