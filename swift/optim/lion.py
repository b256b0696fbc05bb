"""Lion: steps of one size in every element, by the sign of the momentum (Chen et al., arXiv 2302.06675)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum.

        p ← (1 - lr·weight_decay)·p - lr·sign(β1·m + (1 - β1)·g)
        m ← β2·m + (1 - β2)·g

    State per parameter: `exp_avg` (the parameter's shape and dtype).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0):
            raise ValueError("lr and weight_decay must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1): {betas}")
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. `closure` computes the loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise RuntimeError("Lion takes no sparse gradients")
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradient = -gradient if group["maximize"] else gradient
        lr, (beta1, beta2), m = float(group["lr"]), group["betas"], state["exp_avg"]
        if group["weight_decay"]:
            parameter.mul_(1 - lr * group["weight_decay"])
        parameter.sub_(torch.lerp(m, gradient, 1 - beta1).sign_(), alpha=lr)
        m.lerp_(gradient, 1 - beta2)
