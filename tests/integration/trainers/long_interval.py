"""Two ranks whose interval between checkpoints is longer than the run: `long_interval.py STEPS PAUSE_S FILE`; or as
long as a fourth argument says. With "drop" there they fill the log's queue in a few steps, and do not wait for it.

They make no pauses in a replay, nor once that file is there.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from stages import compute, prepare
from torch import nn

import swift_ft

STEPS, PAUSE_S, IN_HASTE = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
OTHER = sys.argv[4] if len(sys.argv) > 4 else "1000000"

if __name__ == "__main__":
    settings: dict[str, Any] = (
        {"checkpoint_every": int(OTHER)}
        if OTHER != "drop"
        else {"checkpoint_every": 1_000_000, "log_queue_bytes": 1 << 20, "log_when_full": "drop"}
    )
    # To drop: 128 KiB a step in each direction, and as much of inputs or targets.
    width, batch = (256, 128) if OTHER == "drop" else (64, 16)
    session = swift_ft.Session.from_env(seed=5, **settings)
    torch.manual_seed(session.rank)
    module = nn.Linear(width, width)
    schedule, optimizer = prepare(session, module)

    def train_step(step: int) -> None:
        x = torch.randn(batch, width, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        compute(session, schedule, x)
        optimizer.step()
        if not (session.replaying or IN_HASTE.exists()):
            time.sleep(PAUSE_S)

    session.run(train_step, num_steps=STEPS)
    session.close()
