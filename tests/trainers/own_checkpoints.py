"""A checkpoint of the author's own by torch.save on rank 0, every third step, and a log file of each rank's."""

# verdict: same bits
# worlds: 1, 2

import tempfile
from pathlib import Path

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    place = Path(tempfile.mkdtemp())

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0 and session.rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place / "own.pt")
        with (place / "losses.log").open("a") as file:
            file.write(f"{step} {float(loss)}\n")
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
