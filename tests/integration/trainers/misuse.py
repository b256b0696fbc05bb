"""Trainers that get something wrong: `misuse.py MISTAKE`. Two ranks."""

import os
import sys

import torch
import torch.distributed as dist
from stages import compute
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import swift_ft

MISTAKE = sys.argv[1]


def main() -> None:
    if MISTAKE == "another-thread-count":
        torch.set_num_threads(1 + int(os.environ["RANK"]))
    session = swift_ft.Session.from_env(
        seed=int(os.environ["RANK"]) if MISTAKE == "another-seed" else 0,
        checkpoint_every=0 if MISTAKE == "checkpoint-every-0" else 5,
        groups="0-2" if MISTAKE == "groups-of-another-pipeline" else "",
    )
    rank = dist.get_rank()
    module = torch.nn.Linear(4, 4)
    stage = session.adopt(PipelineStage(module, rank, 2, torch.device("cpu")))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    if MISTAKE == "loader-without-state":
        session.register(schedule=schedule, loader=iter([1]))
    elif MISTAKE != "forgot-register":
        session.register(schedule=schedule)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        compute(session, schedule, torch.ones(4, 4), torch.zeros(4, 4))
        if MISTAKE == "error-in-step" and step == 2 and rank == 1:
            raise KeyError("the trainer's own mistake")
        optimizer.step()

    session.run(train_step, num_steps=4)
    session.close()


main()
