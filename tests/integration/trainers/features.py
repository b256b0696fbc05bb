"""Three ranks whose stages `torch.distributed.pipelining.pipeline` cut out of one module: `features.py MODE STEPS`.

traced        as they are
unrepeatable  with noise in every forward that no replay can draw again
"""

import os
import random
import sys

import torch
from stages import Positioned, compute
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

import swift_ft

MODE, STEPS = sys.argv[1], int(sys.argv[2])
WIDTH, BATCH, MICROBATCHES = 8, 12, 3


class Data(Positioned):
    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        x = torch.randn(BATCH, WIDTH, generator=generator)
        return x, x.roll(1, dims=1)


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
        compute(session, schedule, x, y)
        optimizer.step()

    session.run(train_step, num_steps=STEPS)
    session.close()


if __name__ == "__main__":
    traced()
    # As the drill's trainer: taking an interpreter with torch apart takes a second, on all ranks at once.
    sys.stdout.flush()
    os._exit(0)
