"""Failures at a layer: when a module inside of a stage has computed, and when its gradient has come back to it."""

from collections.abc import Callable
from typing import Any

import torch


def watch(module: torch.nn.Module, name: str, reached: Callable[[str], None]) -> None:
    """``reached("forward")`` once the submodule of that name has computed its output, ``reached("backward")`` once the
    gradient of that output is known: its own backward comes next. Nothing, if the module has no such submodule: another
    stage of the rank may have it. No bit of what is computed is another one for it."""
    layer = dict(module.named_modules()).get(name)
    if layer is not None:
        layer.register_forward_hook(_Reached(reached))


class _Reached:
    """On a module of the trainer's, who may copy it: a copy is not watched."""

    def __init__(self, reached: Callable[[str], None] | None) -> None:
        self._reached = reached

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._reached is None:
            return
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._backward)  # type: ignore[no-untyped-call]
                break
        self._reached("forward")

    def _backward(self, gradient: torch.Tensor) -> None:
        if self._reached is not None:
            self._reached("backward")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Reached":
        return _Reached(None)

    def __reduce__(self) -> tuple[type["_Reached"], tuple[None]]:
        return _Reached, (None,)
