"""Replicas of a whole model, each of which notes its last loss in an attribute: `captured.py STEPS`."""

import os
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import swift_ft

STEPS = int(sys.argv[1])


class Position:
    """The same on all replicas."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Contrast(nn.Module):
    """MoCo's shape, with what people keep in their modules."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("center", torch.zeros(8), persistent=False)
        self.calls, self.past = 0, [0.0]
        self.counts = np.zeros(2)
        self.rank = os.environ["RANK"]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            self.center = 0.9 * self.center + 0.1 * self.query.weight.mean(0)
        self.calls += 1
        self.past.append(self.past[-1] * 0.5 + float(self.query.bias.detach().sum()))
        self.counts += 1
        scale = 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.01 * self.counts[0] + self.past[-1]
        out = nn.functional.dropout(self.query(x), 0.2, self.training) - self.key(x) + self.center
        return out * float(scale) / self.calls


def attributes(session: swift_ft.Session) -> Any:
    torch.manual_seed(session.rank)
    model = Contrast()
    session.module(model)
    optimizer = session.optimizer(torch.optim.AdamW(model.query.parameters(), lr=1e-2))
    data = Position()
    session.register(loader=data)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        data.position += 1
        generator = torch.Generator().manual_seed(data.position * 10 + session.dp_rank)
        x = torch.randn(4, 8, generator=generator) * (1 + 0.1 * torch.rand(())) * (1 + 0.1 * random.random())
        loss = (model(x) + 1).square().mean()
        model.last_loss = loss.item()
        loss.backward()
        optimizer.step()

    return train_step


def main() -> None:
    with swift_ft.Session.from_env(
        seed=3, checkpoint_every=3, replicas=int(os.environ["WORLD_SIZE"])
    ) as session:
        torch.manual_seed(0)
        session.run(attributes(session), num_steps=STEPS)


if __name__ == "__main__":
    main()
