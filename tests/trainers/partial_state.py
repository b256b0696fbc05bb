"""A step that is a functools.partial, with a dataclass that counts tokens for the learning rate."""

# verdict: named inexact
# worlds: 1
# says: optimizer 0.param_groups.0.lr

from dataclasses import dataclass
from functools import partial

import probe
import torch
from torch import nn

import swift_ft


@dataclass
class Progress:
    tokens: int = 0


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def one_step(state: Progress, step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        state.tokens += x.numel()
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + state.tokens / 500)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    train_step = partial(one_step, Progress())

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
