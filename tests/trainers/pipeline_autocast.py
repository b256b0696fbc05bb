"""Stages under autocast to float16, with dropout."""

# verdict: same bits
# worlds: 2
# device

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(
        session, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8))
    )

    def train_step(step: int) -> None:
        x, _ = probe.batch(step, session.dp_rank)
        optimizer.zero_grad()
        with torch.autocast(probe.device(), dtype=torch.float16):
            losses = probe.through(session, schedule.step, x)
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)
