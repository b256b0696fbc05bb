"""A number that several ranks compute together, and for which nobody waits before somebody uses it."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Later(torch.Tensor):
    """A tensor whose value is asked for by the first operation on it. To torch it is that value."""

    _value: Callable[[], torch.Tensor]

    @staticmethod
    def of(form: torch.Tensor, value: Callable[[], torch.Tensor]) -> "Later":
        """`form`: has its shape and dtype. `value`: waits, and raises what has broken the computation."""
        later: Later = torch.Tensor._make_subclass(Later, torch.zeros_like(form))
        later._value = value
        return later

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_now, (args, kwargs or {}))
        return func(*args, **kwargs)


def _now(value: Any) -> Any:
    return value._value() if isinstance(value, Later) else value
