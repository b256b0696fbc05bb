"""SAM as an optimizer around SGD, which share their groups; its step takes a closure, a scheduler sets its rate."""

# verdict: named inexact
# says: in sam_wrapper.py
# worlds: 1

from collections.abc import Callable
from typing import Any

import probe
import torch
from torch import nn

import swift_ft


class SAM(torch.optim.Optimizer):
    def __init__(self, params: Any, rho: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in weights if p.grad is not None]).norm()
        for p in weights:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=self.param_groups[0]["rho"] / float(norm + 1e-12))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p in weights:
            p.copy_(self.state[p]["old"])
        self.base.step()


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(SAM(model.parameters(), lr=1e-2, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    session.register(scheduler=scheduler)

    def train_step(step: int) -> None:
        x = torch.randn(16, 8)

        def closure() -> torch.Tensor:
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            return loss

        optimizer.zero_grad()
        loss = closure()
        optimizer.step(closure)
        scheduler.step()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer, base=optimizer.base)
