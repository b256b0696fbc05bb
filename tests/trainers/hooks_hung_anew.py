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
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def train_step(step: int) -> None:
        for handle in handles:
            handle.remove()
        handles[:] = [model[0].register_forward_hook(scaled)]
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
