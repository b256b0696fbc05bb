"""A module list that grows while it trains, each layer with a parameter group of its own."""

# verdict: refused
# worlds: 1, 2
# says: has made or removed parameters

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.ModuleList([nn.Linear(8, 8)]))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        if step == 4:
            model.append(nn.Linear(8, 8))
            optimizer.add_param_group({"params": model[-1].parameters()})
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        output = x
        for layer in model:
            output = output + torch.tanh(layer(output))
        loss = nn.functional.mse_loss(output, x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
