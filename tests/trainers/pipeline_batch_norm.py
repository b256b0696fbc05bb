"""BatchNorm in the stages of a pipeline."""

# verdict: same bits
# adaptive: refused
# worlds: 2

import probe
from torch import nn

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(
        session, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    )
    train_step = probe.usual_pass(session, schedule, optimizer)
    probe.run(session, train_step, module=module, optimizer=optimizer)
