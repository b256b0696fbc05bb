"""Optimizers that torch lacks, with steps that can be taken back: LAMB and Lion."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

# LAMB: Adam's direction, with each tensor's step as long as the tensor allows (You et al., arXiv 1904.00962).


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments.

        m ← β1·m + (1 - β1)·g          v ← β2·v + (1 - β2)·g²
        u = m̂/(√v̂ + eps) + weight_decay·p
        p ← p - lr · φ(‖p‖)/‖u‖ · u     φ(x) = min(x, trust_max)

    m̂ and v̂ are the moments over their bias corrections. A tensor whose norm, or whose step's norm, is zero has
    trust ratio 1. State per parameter: `step` (), `exp_avg` and `exp_avg_sq` (the parameter's shape and dtype),
    `trust_ratio` () of the last step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        trust_max: float = math.inf,
        maximize: bool = False,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and trust_max > 0):
            raise ValueError("lr, eps and weight_decay must not be negative, trust_max must be positive")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1): {betas}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "trust_max": trust_max,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

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
            raise RuntimeError("Lamb takes no sparse gradients")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["trust_ratio"] = torch.ones((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradient = -gradient if group["maximize"] else gradient
        beta1, beta2 = group["betas"]
        state["step"] += 1
        step = state["step"].item()
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        update = torch.div(m, denominator).mul_(1 / (1 - beta1**step))
        if group["weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])
        # On the parameter's device: to read the norms, the host would wait for a device at every parameter.
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        length = torch.linalg.vector_norm(parameter, dtype=wide).clamp_(max=group["trust_max"])
        step_length = torch.linalg.vector_norm(update, dtype=wide)
        moves = (length > 0) & (step_length > 0)
        # The step uses the ratio as the state records it.
        trust = state["trust_ratio"].copy_(torch.where(moves, length / step_length, 1.0))
        parameter.sub_(update.to(wide).mul_(trust.to(wide) * group["lr"]))


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
