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
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    centre(model[0])
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
