"""Validation in eval mode, at the start of every third step and behind each update."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    valid_x, valid_y = probe.batch(999, 0, 7)

    def validate() -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            held_out = nn.functional.mse_loss(model(valid_x), valid_y)
        model.train()
        return held_out

    def train_step(step: int) -> None:
        if step % 3 == 0:
            print(f"step {step} validation {validate():.4f}", flush=True)
        loss = probe.update(session, model, optimizer, step)
        probe.note(step, loss, validate())

    probe.run(session, train_step, model=model, optimizer=optimizer)
