"""Updates applied while backward runs, under Adam."""

# verdict: same bits
# worlds: 2
# kills: reduce, update, tail
# plain: 2
# device

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5, updates="wait_free") as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, model, optimizer), model=model, optimizer=optimizer)
