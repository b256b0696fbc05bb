"""A forward hook whose closure alone keeps a running mean, by which it centres the output."""

# verdict: named inexact
# worlds: 1, 2
# says: output 0 of module 0 for equal inputs

import probe
import torch
from torch import nn

import swift_ft


def centre(module: nn.Module) -> None:
    mean = torch.zeros(16)

    def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output - mean

    module.register_forward_hook(hook)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    centre(model[0])
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, model, optimizer), model=model, optimizer=optimizer)
