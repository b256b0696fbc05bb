"""torchdata's StatefulDataLoader, registered as it is: shuffled, augmented, without workers and with two"""

# verdict: same bits
# worlds: 1, 2
# steps: 17
# patience: 300

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import swift_ft
from tests.trainers import probe


class Samples(torch.utils.data.Dataset):
    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.rand(8) if self.augment else x


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    first = StatefulDataLoader(Samples(True), batch_size=4, shuffle=True)
    second = StatefulDataLoader(
        Samples(False), batch_size=4, shuffle=True, num_workers=2, snapshot_every_n_steps=3
    )
    session.register(loader=first, other=second)

    def batches(loader):
        while True:
            yield from loader

    streams = [batches(first), batches(second)]

    def train_step(step: int) -> None:
        x = torch.cat([next(stream) for stream in streams])
        probe.descend(step, optimizer, (model(x) - x.roll(1, 1)).square().mean())

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
