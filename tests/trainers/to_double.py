"""The last steps in float64: model.double() at step 6."""

# verdict: refused
# says: has changed the type or the shape of parameters
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        if step == 6:
            model.double()
        x = torch.randn(16, 8).to(model[0].weight.dtype)
        probe.descend(step, optimizer, nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)))

    probe.run(session, train_step, model=model, optimizer=optimizer)
