"""Four ranks that help each other's replays: `helping.py MODE STEPS`. Every mode trains the same.

exact     a trainer with what shared replays must get right: autocast, a checkpointed block that is used twice,
          parameters that are frozen, strided, or that some microbatches leave unused, an external input for every
          stage, a learning rate that goes by the losses, 5 microbatches
wrong     what rank 1 makes for others computes something else
unable    rank 0 gives its own module away, rank 1 cannot make one, rank 3 makes another one
device    as exact, on the simulated device (`tests/device`)
dying     rank 1 is killed the first time that it makes a stage for another rank
hanging   rank 1 stands still (SIGSTOP) in the first microbatch that it computes for another rank
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from stages import Positioned
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.utils.checkpoint import checkpoint

import swift_ft
from tests.device import simulated

MODE, STEPS = sys.argv[1], int(sys.argv[2])
DEVICE = simulated.NAME if MODE == "device" else "cpu"
WIDTH, MICROBATCHES, STAGES = 16, 5, 4
BATCH = 4 * MICROBATCHES


class Part(nn.Module):
    """[B, WIDTH] bf16 or fp32 -> [B, WIDTH]"""

    def __init__(self, index: int, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.last, self.dropout = index == STAGES - 1, dropout
        self.linear, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.register_buffer("table", torch.randn(WIDTH), persistent=False)
        self.norm = nn.LayerNorm(WIDTH)

    def block(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.linear(x) + self.table), self.dropout, self.training)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.training else self.block(x)
        if scale is not None:
            x = x * scale
            if scale[0, 0] > 1:
                x = x + self.sometimes(x)
        x = self.norm(x @ self.strided + self.frozen)
        return x if self.last else x.bfloat16()


class Hanging(Part):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() and first_time("hung"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(x, scale)


def first_time(what: str) -> bool:
    """In this run, whoever asks."""
    try:
        (Path(os.environ["SWIFT_FAULTS_DIR"]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Data(Positioned):
    def __next__(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        x = torch.randn(BATCH, WIDTH, generator=generator)
        scale = 1 + 0.1 * torch.randn(MICROBATCHES, 1, 1, generator=generator)
        return x, x.roll(1, dims=1), scale.expand(-1, BATCH // MICROBATCHES, WIDTH).reshape(BATCH, WIDTH)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def main() -> None:
    if MODE == "device":
        simulated.load()
    session = swift_ft.Session.from_env(seed=5, checkpoint_every=4)
    rank = session.rank
    module = Part(rank).to(DEVICE)

    def make(index: int) -> nn.Module:
        if MODE == "wrong" and rank == 1:
            return Part(index, dropout=0.25)
        if MODE == "unable" and rank == 0:
            return module
        if MODE == "unable" and rank == 1:
            raise MemoryError("no room")
        if MODE == "unable":
            return nn.Linear(WIDTH, WIDTH)
        if MODE == "dying" and rank == 1 and first_time("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "hanging" and rank == 1:
            return Hanging(index)
        return Part(index).to(DEVICE)

    stage = session.pipeline_stage(module, rank, STAGES, DEVICE)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = session.optimizer(torch.optim.AdamW(trained, lr=0.01))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
    data = Data()
    session.register(schedule=schedule, loader=data, plateau=plateau)
    session.help_replay(make)

    def train_step(step: int) -> None:
        x, y, scale = (each.to(DEVICE) for each in next(data))
        optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs: dict[str, Any] = {"scale": scale}
        if rank == STAGES - 1:
            inputs |= {"target": y, "losses": losses}
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            schedule.step(*([x] if rank == 0 else []), **inputs, return_outputs=False)
        session.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if losses:
            plateau.step(float(torch.stack([loss.detach() for loss in losses]).sum()))

    session.run(train_step, num_steps=STEPS)
    session.close()


if __name__ == "__main__":
    main()
