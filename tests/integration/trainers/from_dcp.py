"""Goes on from a directory of torch's DCP: `from_dcp.py BEFORE STEPS DYING OUT`.

Two replicas with the same data, so that the mean of their gradients is what one process has. Rank 1 kills itself once,
in step DYING.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import swift_ft

BEFORE, STEPS, DYING, OUT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
BEGUN = 3
"""Steps that were done before."""


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return module, torch.optim.AdamW(module.parameters(), lr=0.01)


def loss_of(module: nn.Module, step: int) -> torch.Tensor:
    """`step`: of the whole training."""
    generator = torch.Generator().manual_seed(step)
    return module(torch.randn(6, 8, generator=generator)).square().mean()


def step_plainly(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(module, step).backward()
    optimizer.step()


if __name__ == "__main__":
    module, optimizer = make()
    for parameter in module.parameters():  # so that the optimizer has a state to be filled
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": module.state_dict(), "optim": optimizer.state_dict(), "step": 0}
    swift_ft.load_dcp(state, BEFORE)
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    begun = state["step"]
    with swift_ft.Session.from_env(checkpoint_every=2, replicas=2) as session:
        model = session.module(module)
        session.optimizer(optimizer)

        def train_step(step: int) -> None:
            optimizer.zero_grad()
            loss_of(model, begun + step).backward()
            if step == DYING and session.rank == 1 and not (OUT / "died").exists():
                (OUT / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()

        session.run(train_step, num_steps=STEPS)
