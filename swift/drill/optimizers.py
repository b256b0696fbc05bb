"""The optimizers that a drill can train with, by name and version."""

from collections.abc import Iterable
from typing import Any

import torch

from swift.drill.options import OPTIMIZERS
from swift.optim.lamb import Lamb
from swift.optim.lion import Lion

# name -> (class, settings with which the drill's models learn in a few hundred steps)
_MADE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "amsgrad": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "amsgrad": True}),
    "adam": (torch.optim.Adam, {"lr": 3e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "nadam": (torch.optim.NAdam, {"lr": 3e-3}),
    "radam": (torch.optim.RAdam, {"lr": 3e-3}),
    "lamb": (Lamb, {"lr": 5e-3, "weight_decay": 0.01}),
    "lion": (Lion, {"lr": 3e-4, "weight_decay": 0.1}),
}


def make_optimizer(
    name: str, implementation: str, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """`implementation`: one of `IMPLEMENTATIONS`, or empty for torch's choice."""
    kind, settings = _MADE[name]
    if implementation:
        settings = {**settings, "foreach": implementation == "foreach"}
        if "fused" in OPTIMIZERS[name]:
            settings["fused"] = implementation == "fused"
    # The classes share no signature.
    make: Any = kind
    optimizer: torch.optim.Optimizer = make(list(parameters), **settings)
    return optimizer
