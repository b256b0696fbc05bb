"""A shuffling DataLoader without a generator, a new iterator each epoch inside train_step."""

# verdict: named inexact
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft


class Numbers(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index].sum(0, keepdim=True)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    loader = torch.utils.data.DataLoader(Numbers(), batch_size=16, shuffle=True)
    iterator = iter(loader)

    def train_step(step: int) -> None:
        global iterator
        try:
            x, y = next(iterator)
        except StopIteration:
            iterator = iter(loader)
            x, y = next(iterator)
        probe.descend(step, optimizer, nn.functional.mse_loss(model(x), y))

    probe.run(session, train_step, model=model, optimizer=optimizer)
