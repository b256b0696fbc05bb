"""A Lookahead wrapper around an optimizer: the session is given the inner one."""

# verdict: named inexact
# worlds: 1, 2

import probe
import torch

import swift_ft


class Lookahead:
    def __init__(self, inner: torch.optim.Optimizer, every: int = 3, alpha: float = 0.5) -> None:
        self.inner, self.every, self.alpha, self.count = inner, every, alpha, 0
        self.fast = [p for group in inner.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.fast]

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for slow, fast in zip(self.slow, self.fast, strict=True):
                slow.lerp_(fast, self.alpha)
                fast.copy_(slow)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    inner = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    optimizer = Lookahead(inner)
    probe.run(
        session,
        probe.usual_step(session, model, optimizer),
        model=model,
        optimizer=inner,
        slow=optimizer.slow,
    )
