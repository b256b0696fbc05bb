"""Two stages of two replicas each, whose log may be many steps behind: `lagging.py STEPS PAUSE_S FILE [second]`.

They make no more pauses once that file is there. With "second", whoever takes rank 0's place does nothing in its second
step until that file is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
from stages import compute, prepare
from torch import nn

import swift_ft
from swift_ft import events

STEPS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2])
IN_HASTE = Path(sys.argv[3])
RESTS, REST_S = sys.argv[4:] == ["second"], 60.0
WIDTH, BATCH = 16, 8

if __name__ == "__main__":
    session = swift_ft.Session.from_env(
        seed=5, checkpoint_every=1_000_000, replicas=2, log_queue_bytes=8 << 20, log_when_full="block"
    )
    torch.manual_seed(session.rank)
    module = nn.Linear(WIDTH, WIDTH)
    schedule, optimizer = prepare(session, module)
    first_step = -1

    def train_step(step: int) -> None:
        global first_step
        first_step = step if first_step < 0 else first_step
        generator = torch.Generator().manual_seed(2 * step + session.dp_rank)
        x = torch.randn(BATCH, WIDTH, generator=generator)
        optimizer.zero_grad()
        compute(session, schedule, x)
        session.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        if RESTS and session.rank == 0 and 0 < first_step == step - 1 and not IN_HASTE.exists():
            events.emit("resting", step=step)
            until = time.monotonic() + REST_S
            while time.monotonic() < until and not IN_HASTE.exists():
                time.sleep(0.01)
        elif not IN_HASTE.exists():
            time.sleep(PAUSE_S)

    session.run(train_step, num_steps=STEPS)
    session.close()
    # As the drill's trainer: taking an interpreter with torch apart takes a second, on all ranks at once.
    sys.stdout.flush()
    os._exit(0)
