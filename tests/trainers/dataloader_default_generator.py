"""A registered shuffling DataLoader on torch's default generator, its iterator rebuilt when it is loaded."""

# verdict: same bits
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


class Batches:
    """Epoch after epoch; its state is where it is."""

    def __init__(self) -> None:
        self.epoch, self.place = 0, 0
        self.start()

    def start(self) -> None:
        generator = None  # torch's own
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=16, shuffle=True, num_workers=0, generator=generator
        )
        self.iterator = iter(loader)

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
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = Batches()
    session.register(loader=data)

    def train_step(step: int) -> None:
        x, y = next(data)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
