"""A StatefulDataLoader with a DistributedSampler in a class of the author's own, which has the epoch"""

# verdict: same bits
# worlds: 1, 2
# steps: 17
# patience: 300

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import swift_ft
from tests.trainers import probe


class Samples(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Loader:
    def __init__(self, rank: int, ranks: int) -> None:
        self.sampler = DistributedSampler(Samples(), num_replicas=ranks, rank=rank, seed=1)
        self.loader = StatefulDataLoader(Samples(), batch_size=4, sampler=self.sampler, num_workers=2)
        self.epoch, self.iterator = 0, None

    def __next__(self) -> torch.Tensor:
        if self.iterator is None:
            self.sampler.set_epoch(self.epoch)
            self.iterator = iter(self.loader)
        try:
            return next(self.iterator)
        except StopIteration:
            self.epoch, self.iterator = self.epoch + 1, None
            return next(self)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.sampler.set_epoch(self.epoch)
        self.loader.load_state_dict(state["loader"])
        self.iterator = iter(self.loader)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = Loader(session.dp_rank, session.replicas)
    session.register(loader=loader)

    def train_step(step: int) -> None:
        x = next(loader)
        probe.descend(step, optimizer, (model(x) - x.roll(1, 1)).square().mean())

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
