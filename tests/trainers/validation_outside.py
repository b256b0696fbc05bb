"""A loop of the author's own: session.run to the next validation, validate, go on."""

# verdict: refused
# says: call it once, with all steps
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

    for epoch in range(1, probe.steps() // 4 + 2):
        session.run(probe.usual_step(session, model, optimizer), num_steps=min(4 * epoch, probe.steps()))
        model.eval()
        with torch.no_grad():
            held_out = nn.functional.mse_loss(model(valid_x), valid_y)
        model.train()
        print(f"epoch {epoch} validation {held_out:.4f}", flush=True)
    probe.end(session, model=model, optimizer=optimizer)
