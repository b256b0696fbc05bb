"""A physics-informed network: Adam first, from step 6 on LBFGS with a line search; a double backward."""

# verdict: same bits
# worlds: 1, 2
# kills: moment, optimizer, tail
# plain: 1

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)))
    adam = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    optimizer = session.optimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    )

    def train_step(step: int) -> None:
        x = torch.rand(16, 1, generator=torch.Generator().manual_seed(step)).mul(3).requires_grad_()

        def residual() -> torch.Tensor:
            model.zero_grad()
            u = model(x)
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            loss = (du + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()
            loss.backward()
            return loss

        if step < 6:
            loss = residual()
            adam.step()
        else:
            loss = optimizer.step(residual)
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
