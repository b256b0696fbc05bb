"""Autocast to float16 with a GradScaler, registered: updates are skipped at the start, and whenever it has grown."""

# verdict: same bits
# worlds: 1, 2
# plain: 1
# device

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scaler = torch.amp.GradScaler(probe.device(), init_scale=2.0**18, growth_interval=2)
    session.register(scaler=scaler)

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        with torch.autocast(probe.device(), dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        session.reduce_gradients()
        scaler.step(optimizer)
        scaler.update()
        probe.note(step, loss, scaler.get_scale())

    probe.run(session, train_step, model=model, optimizer=optimizer, scaler=scaler)
