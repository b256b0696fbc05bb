"""What is known of optimizer classes: whose step treats each parameter by itself, and so can be cut into buckets."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from swift.optim.lamb import Lamb
from swift.optim.lion import Lion
from swift.optim.torch_names import bare_step

PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.Adafactor,
    torch.optim.SparseAdam,
    Lamb,
    Lion,
)
"""Their step is the sum of their steps over any parts of the parameters. Of a class that is not here nobody knows:
a counter in a group or a norm over all parameters would come out differently with every bucket."""


def stock_step(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer] | None:
    """The class of `PER_PARAMETER` whose step `cls` runs, unchanged; None if it has one of its own."""
    step = _function(cls)
    return next((known for known in PER_PARAMETER if _function(known) is step), None)


def _function(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    function: Callable[..., Any] = inspect.unwrap(cls.step)
    return function


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True if its step cannot be called without a function that computes the loss again (LBFGS)."""
    parameters = list(inspect.signature(bare_step(type(optimizer))).parameters.values())
    required = [p for p in parameters[1:] if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    return any(p.kind is not p.VAR_KEYWORD for p in required)
