"""Three stages with large boundaries and few parameters: `reading.py MICROBATCH_S STEPS`."""

import sys

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft
from swift_ft.lab.drill.model import paced

MICROBATCH_S, STEPS = float(sys.argv[1]), int(sys.argv[2])
STAGES, MICROBATCHES, ROWS, WIDTH = 3, 4, 32, 1024


class Part(nn.Module):
    """[ROWS, WIDTH] -> [ROWS, WIDTH]"""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(paced(x * self.scale, MICROBATCH_S / 3, 2 * MICROBATCH_S / 3))


def main() -> None:
    with swift_ft.Session.from_env(seed=1, checkpoint_every=1000) as session:
        module = Part()
        stage = session.pipeline_stage(module, session.rank, STAGES)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        optimizer = session.optimizer(torch.optim.SGD(module.parameters(), lr=0.01))
        session.register(schedule=schedule)

        def train_step(step: int) -> None:
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)
            optimizer.zero_grad()
            if session.rank == 0:
                schedule.step(batch)
            elif session.rank == STAGES - 1:
                schedule.step(target=batch, return_outputs=False)
            else:
                schedule.step()
            optimizer.step()

        session.run(train_step, num_steps=STEPS)


if __name__ == "__main__":
    main()
