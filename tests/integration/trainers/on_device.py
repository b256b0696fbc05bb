"""Stages on the simulated device, and what the host waits for there:
`-m … UPDATES REPLICAS STEPS CHECKPOINT_EVERY DIRECTORY WIRE`. UPDATES may be "ddp": after backward, in which
DistributedDataParallel averages.

Writes `RANK.PID` there: a line of JSON for each step with its number, whether it was replayed, and for each wait
[what, "line < its caller's < …", how often].
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft
from tests.device import simulated

MODE, DIRECTORY, WIRE = sys.argv[1], Path(sys.argv[5]), sys.argv[6]
UPDATES = "after_backward" if MODE == "ddp" else MODE
REPLICAS, STEPS, EVERY = map(int, sys.argv[2:5])
WIDTH, BATCH, MICROBATCHES = 16, 8, 4


class Waits:
    """Of one step after the other, each with all that the session did at its end."""

    def __init__(self, session: swift_ft.Session) -> None:
        self._session = session
        self._out = (DIRECTORY / f"{session.rank}.{os.getpid()}").open("w", buffering=1)
        self._step: tuple[int, bool] | None = None

    def begin(self, step: int | None) -> None:
        seen = [[what, where, count] for (what, where), count in simulated.waits().items()]
        if self._step is not None:
            self._out.write(json.dumps([*self._step, seen]) + "\n")
        self._step = None if step is None else (step, self._session.replaying)


def loss(given: Tensor, wanted: Tensor) -> Tensor:
    return (given - wanted).square().mean()


def main() -> None:
    if WIRE == "nccl":
        simulated.load_with_communicators(DIRECTORY.parent)
    simulated.load()
    torch.accelerator.set_device_index(0)
    with swift_ft.Session.from_env(
        checkpoint_every=EVERY, rehearse="off", replicas=REPLICAS, updates=UPDATES, bucket_bytes=512
    ) as session:
        rank, ranks = session.pipeline_rank, session.pipeline_ranks
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh())
        module.register_buffer("mask", torch.ones(WIDTH, WIDTH), persistent=False)
        module.to(simulated.NAME)
        if MODE == "ddp":
            module = session.ddp(module)
        stage = session.pipeline_stage(module, rank, ranks, simulated.NAME)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
        optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
        session.register(schedule=schedule)
        first, last = rank == 0, rank == ranks - 1
        waits = Waits(session)

        def train_step(step: int) -> None:
            waits.begin(step)
            batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
            losses: list[Tensor] = []
            optimizer.zero_grad()
            schedule.step(
                *([batch.to(simulated.NAME)] if first else []),
                **({"target": batch.to(simulated.NAME), "losses": losses} if last else {}),
                return_outputs=False,
            )
            if last:
                torch.stack(losses).mean().item()
            if UPDATES == "after_backward":
                session.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()

        session.run(train_step, num_steps=STEPS)
        waits.begin(None)


if __name__ == "__main__":
    main()
