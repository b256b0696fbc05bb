"""`python -m tests.trainers.harness.plain SCRIPT plain`: a trainer by torch alone. `session`: as ever, for comparison.

In the place of `swift` is a session that does nothing: a trainer's calls of it give back what they are given. With
replicas it averages gradients in front of an update, added in the order of ranks.
"""

import os
import random
import runpy
import sys
import types
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ENV_STORE = "TRAINERS_STORE"


class Session:
    """As much of `swift_ft.Session` as trainers have plain torch's bits with."""

    pipeline_rank, pipeline_ranks = 0, 1

    def __init__(self) -> None:
        self.rank = self.dp_rank = int(os.environ["RANK"])
        self.replicas = int(os.environ["WORLD_SIZE"])
        self.step = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self._averaged: set[torch.Tensor] = set()
        if self.replicas > 1:
            store = f"file://{os.environ[ENV_STORE]}"
            dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.replicas)

    @classmethod
    def from_env(cls, **_settings: Any) -> Self:
        return cls()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def ddp(self, module: torch.nn.Module) -> torch.nn.Module:
        return DistributedDataParallel(module)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._optimizers.append(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self._average(optimizer))
        optimizer.register_step_post_hook(lambda *_: self._averaged.clear())
        return optimizer

    def register(self, **_objects: Any) -> None: ...

    def log(self, **_values: Any) -> None: ...

    def reduce_gradients(self) -> None:
        for optimizer in self._optimizers:
            self._average(optimizer)

    def accumulating(self) -> Any:
        return nullcontext()

    def clip_grad_norm_(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        given = list(parameters)
        self._mean(given)
        return torch.nn.utils.clip_grad_norm_(given, max_norm)

    def run(self, train_step: Callable[[int], object], num_steps: int) -> None:
        for step in range(num_steps):
            train_step(step)
            self.step = step + 1

    def _average(self, optimizer: torch.optim.Optimizer) -> None:
        self._mean(p for group in optimizer.param_groups for p in group["params"])

    def _mean(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if self.replicas > 1 and parameter.grad is not None and parameter not in self._averaged:
                each = [torch.empty_like(parameter.grad) for _ in range(self.replicas)]
                dist.all_gather(each, parameter.grad)
                parameter.grad.copy_(sum(each[1:], each[0]) / self.replicas)
                self._averaged.add(parameter)


def main(script: Path, kind: str) -> None:
    if kind == "plain":
        module: Any = types.ModuleType("swift_ft")
        module.Session = Session
        sys.modules["swift_ft"] = module
    sys.path.insert(0, str(script.parent))
    # As `swift-ft run` does.
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
