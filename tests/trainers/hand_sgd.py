"""No optimizer at all: weights are changed by hand, with momenta in a list of tensors that is registered."""

# verdict: refused
# says: no optimizer
# worlds: 1

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    session.register(velocity=velocity)

    def train_step(step: int) -> None:
        x = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for v, p, g in zip(velocity, model.parameters(), gradients, strict=True):
                v.mul_(0.9).add_(g)
                p.sub_(v, alpha=1e-2)
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model)
