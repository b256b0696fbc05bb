"""Replicas of whole models whose state is not of the usual kind: `captured.py MODE STEPS`.

layout      a channels_last convolution net under fused AdamW, and one of bf16 under NAdam; two whole modules
attributes  a momentum encoder, Python attributes, buffers that are not persistent, `random` and numpy in the forward
apart       the same, and each replica notes its last loss in an attribute
"""

import os
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import swift_ft

MODE, STEPS = sys.argv[1], int(sys.argv[2])


class Position:
    """The same on all replicas."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def layout(session: swift_ft.Session) -> Any:
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 1))
    first.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    second = nn.Conv2d(4, 4, 3, dtype=torch.bfloat16)
    second.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    session.module(first)
    session.module(second)
    optimizers = [
        session.optimizer(torch.optim.AdamW(first.parameters(), fused=True)),
        session.optimizer(torch.optim.NAdam(second.parameters())),
    ]
    data = Position()
    session.register(loader=data)

    def train_step(step: int) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        data.position += 1
        generator = torch.Generator().manual_seed(data.position * 10 + session.dp_rank)
        x: Tensor = torch.randn(4, 3, 8, 8, generator=generator)
        x = x.to(memory_format=torch.channels_last)
        second(first(x).bfloat16()).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    return train_step


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
        if MODE != "attributes":
            model.last_loss = loss.item()
        loss.backward()
        optimizer.step()

    return train_step


def main() -> None:
    with swift_ft.Session.from_env(
        seed=3, checkpoint_every=3, replicas=int(os.environ["WORLD_SIZE"])
    ) as session:
        torch.manual_seed(0)
        train_step = (layout if MODE == "layout" else attributes)(session)
        session.run(train_step, num_steps=STEPS)


if __name__ == "__main__":
    main()
