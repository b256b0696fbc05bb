"""A registered list of averages, gone over in pairs that were zipped once; a registered score by a second name."""

# verdict: same bits
# worlds: 1, 2
# quick

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=2e-2))
    averages = [p.detach().clone() for p in model.parameters()]
    pairs = list(zip(model.parameters(), averages, strict=True))
    scores = {"best": {"norm": 1e9, "at": -1}, "past": []}
    best, past = scores["best"], scores["past"]
    session.register(averages=averages, scores=scores)

    def train_step(step: int) -> None:
        x = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, average in pairs:
                average.lerp_(p, 0.1)
                if step % 4 == 3:
                    p.lerp_(average, 0.5)
        norm = float(sum(p.detach().norm() for p in model.parameters()))
        past.append(norm)
        if norm < best["norm"]:
            best["norm"], best["at"] = norm, step
        else:
            optimizer.param_groups[0]["lr"] *= 0.95
        probe.note(step, loss, norm, len(past))

    probe.run(session, train_step, model=model, optimizer=optimizer, averages=averages, scores=scores)
