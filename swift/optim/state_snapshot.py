"""A dictionary as it was, and as it will be again."""

import copy
from collections import deque
from collections.abc import Collection
from typing import Any

import torch


class Kept:
    """``Kept(holder)`` … ``put_back()``

    Values of tensors go back into the same tensors, numbers and containers into `holder`; what is there besides by then
    goes. Keys keep their order: a state's keys are told in theirs. `but`: keys that are left alone.
    """

    def __init__(self, holder: dict[Any, Any], *, but: Collection[Any] = ()):
        self._holder = holder
        self._but = frozenset(but)
        self._order = list(holder)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._value = {key: self._take(value) for key, value in holder.items() if key not in self._but}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The copies that are held."""
        return [copied for _, copied in self._tensors]

    @torch.no_grad()
    def put_back(self) -> dict[Any, Any]:
        """Gives `holder`."""
        for tensor, copied in self._tensors:
            tensor.copy_(copied)
        left_alone = {key: value for key, value in self._holder.items() if key in self._but}
        again = {key: _walk(value, lambda item: item) for key, value in self._value.items()} | left_alone
        self._holder.clear()
        self._holder.update({key: again[key] for key in self._order if key in again} | left_alone)
        return self._holder

    def _take(self, value: Any) -> Any:
        return _walk(value, self._remember)

    def _remember(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            self._tensors.append((value, value.detach().clone()))
        return value


def _walk(value: Any, visit: Any) -> Any:
    """Containers anew, so that nobody can change ours; of everything else what `visit` gives."""
    if type(value) is tuple:
        return tuple(_walk(item, visit) for item in value)
    if isinstance(value, dict):
        named = copy.copy(value)
        named.update({key: _walk(item, visit) for key, item in value.items()})
        return named
    if isinstance(value, list | deque):
        listed: list[Any] | deque[Any] = copy.copy(value)
        for index, item in enumerate(value):
            listed[index] = _walk(item, visit)
        return listed
    if isinstance(value, set):
        return copy.copy(value)
    return visit(value)
