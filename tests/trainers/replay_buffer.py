"""A replay buffer in a Python list of the script, unregistered, sampled by random."""

# verdict: named inexact
# worlds: 1, 2

import random

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    memory: list[tuple[torch.Tensor, torch.Tensor]] = []

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        memory.append((x, y))
        del memory[:-6]
        x, y = random.choice(memory)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
