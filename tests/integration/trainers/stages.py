"""What trainers in this directory have in common, most of them with one stage on each rank."""

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


class Positioned:
    """Data that are known by their position."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def compute(session: swift_ft.Session, schedule: Any, x: Tensor, target: Tensor | None = None) -> None:
    """Forwards and backwards of a batch, which is its own target unless another one is given."""
    if session.pipeline_rank == 0:
        schedule.step(x)
    elif session.pipeline_rank == session.pipeline_ranks - 1:
        schedule.step(target=x if target is None else target)
    else:
        schedule.step()
