"""Three ranks that use what the drill's trainer does not: `features.py traced|manual|unrepeatable STEPS`.

traced   stages that `torch.distributed.pipelining.pipeline` cut out of one module, adopted
manual   stages with running statistics (buffers that a forward changes), activation checkpointing, two
         accumulation passes and an evaluation in one step, a tied scale whose gradient is summed over all
         ranks, bf16 boundaries, randomness outside of the stages, and a bucket of state of the trainer's own
"""

import os
import random
import sys

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from torch.utils.checkpoint import checkpoint

import swift_ft

MODE, STEPS = sys.argv[1], int(sys.argv[2])
WIDTH, BATCH, MICROBATCHES = 8, 12, 3


class Data:
    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        x = torch.randn(BATCH, WIDTH, generator=generator)
        return x, x.roll(1, dims=1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Average:
    """An exponential average of the weights: state that is the trainer's own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values = [p.detach().clone() for p in module.parameters()]

    def update(self) -> None:
        torch._foreach_lerp_(self.values, [p.detach() for p in self.module.parameters()], 0.1)

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        self.values = [value.clone() for value in state["values"]]


class Whole(nn.Module):
    """Traced and cut into three."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x


class Part(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.tied = nn.Parameter(torch.ones(1))
        self.last = last

    def block(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(torch.tanh(self.linear(x)), 0.2, self.training) * self.tied

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x.float(), use_reentrant=False) if self.training else self.block(x.float())
        x = self.norm(x)
        return x if self.last else x.bfloat16()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def traced() -> None:
    session = swift_ft.Session.from_env(seed=5, checkpoint_every=3)
    torch.manual_seed(1)
    whole = Whole()
    example = torch.randn(BATCH // MICROBATCHES, WIDTH)
    split = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2)}
    pipe = pipeline(whole, mb_args=(example,), split_spec=split)
    stage = session.adopt(pipe.build_stage(session.rank, torch.device("cpu")))
    if MODE == "unrepeatable":
        stage.submod.register_forward_hook(
            lambda _module, _inputs, output: output * (1 + 0.01 * random.SystemRandom().random())
        )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = session.optimizer(torch.optim.SGD(stage.submod.parameters(), lr=0.1, momentum=0.9))
    data = Data()
    session.register(schedule=schedule, loader=data)

    def train_step(step: int) -> None:
        x, y = next(data)
        optimizer.zero_grad()
        if session.rank == 0:
            schedule.step(x)
        elif session.rank == 2:
            schedule.step(target=y)
        else:
            schedule.step()
        optimizer.step()

    session.run(train_step, num_steps=STEPS)
    session.close()


def manual() -> None:
    session = swift_ft.Session.from_env(seed=5, checkpoint_every=3, codec="lz4")
    rank = session.rank
    torch.manual_seed(rank)
    module = Part(last=rank == 2)
    stage = session.adopt(PipelineStage(module, rank, 3, torch.device("cpu")))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=0.01))
    data, average = Data(), Average(module)
    session.register(schedule=schedule, loader=data, average=average)

    def one_pass(call: object, noise: float) -> None:
        x, y = next(data)
        assert callable(call)
        if rank == 0:
            call(x * noise)
        elif rank == 2:
            call(target=y)
        else:
            call()

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        noise = 1.0 + 0.01 * torch.rand(()).item()  # drawn outside of the stages
        one_pass(schedule.step, noise)
        one_pass(schedule.step, noise)
        module.eval()
        with torch.no_grad():
            one_pass(schedule.eval, 1.0)
        module.train()
        assert module.tied.grad is not None
        module.tied.grad = session.all_reduce(module.tied.grad, "tied")
        session.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        average.update()

    session.run(train_step, num_steps=STEPS)
    session.close()


if __name__ == "__main__":
    {"traced": traced, "manual": manual, "unrepeatable": traced}[MODE]()
    if MODE != "manual":
        # As the drill's trainer: taking an interpreter with torch apart takes a second, on all ranks at once.
        sys.stdout.flush()
        os._exit(0)
