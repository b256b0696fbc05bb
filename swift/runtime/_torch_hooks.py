"""Where torch keeps the hooks of modules, parameters and optimizers.

Beside `_torch`, which has the rest.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from swift.runtime._torch import require

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
require(
    {
        "torch.nn.Module": (torch.nn.Module(), (*_MODULE_HOOKS, *_HOOK_FLAGS)),
        "torch.nn.Parameter": (torch.nn.Parameter, _PARAMETER_HOOKS),
    }
)


def hooks_of(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[Callable[..., Any]]:
    """All that somebody has hung upon these modules, their parameters and optimizers, or upon all modules."""
    everywhere = torch.nn.modules.module
    kinds: list[dict[int, Any]] = [
        everywhere._global_forward_hooks,
        everywhere._global_forward_pre_hooks,
        everywhere._global_backward_hooks,
        everywhere._global_backward_pre_hooks,
    ]
    kinds += [hooks for module in modules for _, hooks in hooks_by_kind(module)]
    kinds += [hooks for optimizer in optimizers for _, hooks in optimizer_hooks(optimizer)]
    return [hook for hooks in kinds for hook in hooks.values()]


def own_hooks(module: torch.nn.Module) -> bool:
    """(every step, each module) There are hooks on it; its parameters are not asked."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )


def has_hooks(module: torch.nn.Module) -> bool:
    """There are hooks on it, or on its parameters."""
    if own_hooks(module):
        return True
    for parameter in module._parameters.values():
        if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            return True
    return False


def hooks_by_kind(module: torch.nn.Module) -> list[tuple[str, dict[int, Any]]]:
    """The kinds that there are, and the dictionaries that hooks are in."""
    found = [(kind, vars(module)[kind]) for kind in _MODULE_HOOKS]
    for name, parameter in module._parameters.items():
        for kind in _PARAMETER_HOOKS if parameter is not None else ():
            if (hooks := getattr(parameter, kind)) is not None:
                found.append((f"{name}.{kind}", hooks))
    return found


def hook_flags(module: torch.nn.Module) -> list[tuple[str, dict[int, Any]]]:
    """How hooks are called, by the numbers of the hooks."""
    return [(kind, vars(module)[kind]) for kind in _HOOK_FLAGS]


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[int, Any]]]:
    """Around its step."""
    return [(kind, getattr(optimizer, kind, {})) for kind in _OPTIMIZER_HOOKS]
