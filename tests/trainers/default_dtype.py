"""torch.set_default_dtype in the middle of training: what steps make is float64 from there on."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        if step == 5:
            torch.set_default_dtype(torch.float64)
        noise = torch.randn(16, 8)
        assert noise.dtype == (torch.float64 if step >= 5 else torch.float32)
        x = noise.float()
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
