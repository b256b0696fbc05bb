"""A loader that shuffles by one generator for all epochs, draws on to its epoch, and begins again to go back."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft


class Batches:
    """Epoch after epoch; its state is where it is."""

    def __init__(self, seed: int) -> None:
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        self.seed = seed
        self.begin()

    def begin(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.epoch, self.place = 0, 0
        self.order = self.shuffled()

    def shuffled(self) -> torch.Tensor:
        return torch.randperm(len(self.x), generator=self.generator)

    def __next__(self) -> torch.Tensor:
        if self.place == 4:
            self.epoch, self.place, self.order = self.epoch + 1, 0, self.shuffled()
        self.place += 1
        return self.x[self.order[16 * (self.place - 1) : 16 * self.place]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["epoch"] < self.epoch:
            self.begin()
        while self.epoch < state["epoch"]:
            self.epoch, self.order = self.epoch + 1, self.shuffled()
        self.place = state["place"]


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = Batches(0)
    session.register(loader=data)

    def train_step(step: int) -> None:
        x = next(data)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
