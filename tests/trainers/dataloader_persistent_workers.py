"""A registered DataLoader whose workers stay for all epochs, and augment with numbers of their own."""

# verdict: same bits
# worlds: 2

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
        x = self.x[index] + 0.1 * torch.randn(8)
        return x, x.sum(0, keepdim=True)


class Batches:
    """Epoch after epoch; its state is where it is."""

    def __init__(self) -> None:
        self.loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=16, shuffle=True, num_workers=2, persistent_workers=True
        )
        self.epoch, self.place = 0, 0
        self.start()

    def start(self) -> None:
        self.iterator = iter(self.loader)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.place == 4:
            self.epoch, self.place = self.epoch + 1, 0
            self.start()
        self.place += 1
        return next(self.iterator)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.start()
        for _ in range(self.place):
            next(self.iterator)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = Batches()
    session.register(loader=data)

    def train_step(step: int) -> None:
        x, y = next(data)
        probe.descend(step, optimizer, nn.functional.mse_loss(model(x), y))

    probe.run(session, train_step, model=model, optimizer=optimizer)
