"""What trainers in this directory with one stage on each rank have in common."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

import swift_ft


def prepare(session: swift_ft.Session, module: nn.Module, microbatches: int = 2) -> tuple[Any, Any]:
    """The schedule, which is registered, and the optimizer of this rank's stage."""
    stage = session.pipeline_stage(module, session.pipeline_rank, session.pipeline_ranks)
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=nn.functional.mse_loss)
    session.register(schedule=schedule)
    return schedule, session.optimizer(torch.optim.SGD(module.parameters(), lr=0.1))


def compute(session: swift_ft.Session, schedule: Any, x: Tensor) -> None:
    """Forwards and backwards of a batch, which is its own target."""
    if session.pipeline_rank == 0:
        schedule.step(x)
    elif session.pipeline_rank == session.pipeline_ranks - 1:
        schedule.step(target=x)
    else:
        schedule.step()
