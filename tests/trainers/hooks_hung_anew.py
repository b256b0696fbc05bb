"""A hook that each step takes off and hangs anew, with its handle in a list of the script."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft


def scaled(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def train_step(step: int) -> None:
        for handle in handles:
            handle.remove()
        handles[:] = [model[0].register_forward_hook(scaled)]
        probe.note(step, probe.update(session, model, optimizer, step))

    probe.run(session, train_step, model=model, optimizer=optimizer)
