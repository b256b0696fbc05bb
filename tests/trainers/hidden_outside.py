"""An RNN whose hidden state is a variable of the script, unregistered."""

# verdict: named inexact
# worlds: 1

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    cell, head = nn.GRUCell(8, 16), nn.Linear(16, 1)
    model = session.module(nn.ModuleList([cell, head]))
    hidden = torch.zeros(16, 16)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        global hidden
        x, y = probe.batch(step, session.dp_rank)
        hidden = cell(x, hidden.detach())
        loss = nn.functional.mse_loss(head(hidden), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
