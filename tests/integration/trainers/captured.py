"""Replicas of whole models whose state is not of the usual kind: `captured.py MODE STEPS`.

layout    a channels_last convolution net under fused AdamW, and one of bf16 under NAdam; two whole modules
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

import swift

MODE, STEPS = sys.argv[1], int(sys.argv[2])


class Position:
    """The same on all replicas."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def layout(session: swift.Session) -> Any:
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
        generator = torch.Generator().manual_seed(data.position * 10 + session.column)
        x: Tensor = torch.randn(4, 3, 8, 8, generator=generator)
        x = x.to(memory_format=torch.channels_last)
        second(first(x).bfloat16()).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    return train_step


def main() -> None:
    with swift.Session.from_env(
        seed=3, checkpoint_every=3, replicas=int(os.environ["WORLD_SIZE"])
    ) as session:
        torch.manual_seed(0)
        train_step = {"layout": layout}[MODE](session)
        session.run(train_step, num_steps=STEPS)


if __name__ == "__main__":
    main()
