"""Two stages with randomness wherever people have it: `masking.py MODE STEPS`.

Tokens are masked by `torch.rand` in `train_step`, alike on the first and the last rank; `random` and numpy draw outside
of the stages and inside; a shuffled DataLoader, whose epochs end inside of the run; the stages have buffers that are
not persistent and Python attributes that their forwards change.

eager   the loader's iterator is rebuilt in `load_state_dict`
lazy    … at the next batch, with a worker
"""

import random
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, Dataset

import swift_ft

MODE, STEPS = sys.argv[1], int(sys.argv[2])
WIDTH, BATCH, MICROBATCHES = 6, 8, 2


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), index / 40) + torch.rand(WIDTH) * 0.1


class Data:
    def __init__(self) -> None:
        self.loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True, num_workers=MODE == "lazy")
        self.position = 0
        self.it: Any = iter(self.loader) if MODE == "eager" else None

    def __next__(self) -> Tensor:
        if self.it is None:
            self._again()
        batch = next(self.it, None)
        if batch is None:
            self.it, self.position = iter(self.loader), 0
            batch = next(self.it)
        self.position += 1
        assert isinstance(batch, Tensor)
        return batch

    def _again(self) -> None:
        self.it = iter(self.loader)
        for _ in range(self.position):
            next(self.it)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.it = state["position"], None
        if MODE == "eager":
            self._again()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.calls, self.past = 0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.past.append(0.5 * self.past[-1] + float(self.mean.sum()))
        noise = 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.01 * self.past[-1]
        return torch.tanh(nn.functional.dropout(self.linear(x), 0.1, self.training) + self.mean) * noise


def main() -> None:
    session = swift_ft.Session.from_env(seed=5, checkpoint_every=3)
    rank = session.rank
    torch.manual_seed(rank)
    module = Part()
    stage = session.adopt(PipelineStage(module, rank, 2, torch.device("cpu")))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=0.01))
    torch.manual_seed(9)
    data = Data()
    session.register(schedule=schedule, loader=data)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        x = next(data)
        mask = torch.rand(x.shape) < 0.3
        scale = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
        if rank == 0:
            schedule.step(torch.where(mask, torch.zeros(()), x) * scale)
        else:
            schedule.step(target=torch.where(mask, x, torch.zeros(())))
        for group in optimizer.param_groups:
            group["lr"] = (
                0.01 + 0.001 * torch.rand(()).item() + 0.001 * random.random()
            )  # behind the schedule
        optimizer.step()

    session.run(train_step, num_steps=STEPS)
    session.close()


if __name__ == "__main__":
    main()
