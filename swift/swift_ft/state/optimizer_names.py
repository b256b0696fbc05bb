"""Private names of torch's optimizers that the journal and undo need, checked at import."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as _module

from swift_ft import torch_private

torch_private.require(
    {
        "torch.optim.optimizer": (_module, ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"]),
        "torch": (torch, ["_foreach_copy_"]),
        "torch.optim.Optimizer": (torch.optim.Optimizer, ["_process_value_according_to_param_policy"]),
        "torch.Tensor": (torch.Tensor, ["_version", "_is_zerotensor"]),
    }
)

copy_: Callable[..., None] = torch._foreach_copy_


@contextmanager
def state_left_alone() -> Iterator[None]:
    """Makes optimizers load a state's tensors unchanged, without a cast to their parameters' dtype."""
    base: Any = torch.optim.Optimizer
    policy = base.__dict__["_process_value_according_to_param_policy"]

    def as_it_is(param: Any, value: Any, *_: Any, **__: Any) -> Any:
        return value

    base._process_value_according_to_param_policy = staticmethod(as_it_is)
    try:
        yield
    finally:
        base._process_value_according_to_param_policy = policy


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's elements are those in its memory, one after another."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor._is_zerotensor()


def version(tensor: torch.Tensor) -> int:
    """Returns a counter that grows with every in-place change of the tensor."""
    return tensor._version


def pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Returns the hooks that torch calls before `optimizer`'s step, in its order: global ones, then its own."""
    return [*_module._global_optimizer_pre_hooks.values(), *_own(optimizer, "_optimizer_step_pre_hooks")]


def post_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Returns the hooks that torch calls after `optimizer`'s step, in its order: its own, then global ones."""
    return [*_own(optimizer, "_optimizer_step_post_hooks"), *_module._global_optimizer_post_hooks.values()]


def own_post_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(_own(optimizer, "_optimizer_step_post_hooks"))


def _own(optimizer: torch.optim.Optimizer, name: str) -> list[Callable[..., Any]]:
    return list(getattr(optimizer, name).values())


def bare_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Returns the class's step without torch's wrapper that calls the hooks."""
    step = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
