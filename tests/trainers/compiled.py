"""torch.compile, with the eager back end of the tests."""

# verdict: same bits
# worlds: 1, 2
# patience: 200
# device

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, compiled, optimizer), model=model, optimizer=optimizer)
