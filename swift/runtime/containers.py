"""Lists, dicts and deques that a trainer registers as they are.

Their items go back into the very lists and tensors that the script has made, where those were still the items: it may
hold them by another name, too (``best = stats["best"]``, ``pairs = list(zip(model.parameters(), ema))``).
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from swift.runtime.before import plain_tensor

_KINDS = (list, dict, deque)
_Path = tuple[Any, ...]


class Container:
    """As an object that a recovery can take back."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._first = list(_parts(value, (), set()))

    def state_dict(self) -> dict[str, Any]:
        same = [number for number, (path, first) in enumerate(self._first) if self._at(path) is first]
        return {"state": self._value.copy(), "same": same}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        same = set(state.get("same", ()))
        firsts = {path: first for number, (path, first) in enumerate(self._first) if number in same}
        _fill(self._value, state["state"], (), firsts)

    def _at(self, path: _Path) -> Any:
        container = self._value
        for key in path:
            if type(container) not in _KINDS:
                return None
            try:
                container = container[key]
            except (KeyError, IndexError):
                return None
        return container


def _parts(value: Any, path: _Path, seen: set[int]) -> Iterator[tuple[_Path, Any]]:
    """What can be changed in place, by where it is; parents first."""
    seen.add(id(value))
    for key, item in value.items() if type(value) is dict else enumerate(value):
        if id(item) in seen:
            continue
        if type(item) in _KINDS:
            yield (*path, key), item
            yield from _parts(item, (*path, key), seen)
        elif isinstance(item, torch.Tensor | np.ndarray):
            seen.add(id(item))
            yield (*path, key), item


def _fill(container: Any, items: Any, path: _Path, firsts: dict[_Path, Any]) -> None:
    if type(container) is dict:
        made = {key: _again(item, (*path, key), firsts) for key, item in items.items()}
        container.clear()
        container.update(made)
    else:
        again = [_again(item, (*path, number), firsts) for number, item in enumerate(items)]
        container.clear()
        container.extend(again)


def _again(item: Any, path: _Path, firsts: dict[_Path, Any]) -> Any:
    """`item`, in what the script has made for it."""
    first = firsts.get(path)
    if type(item) in _KINDS and (first is None or type(first) is not type(item)):
        first = deque(maxlen=item.maxlen) if type(item) is deque else type(item)()
    if type(item) in _KINDS:
        _fill(first, item, path, firsts)
        return first
    if isinstance(item, torch.Tensor) and isinstance(first, torch.Tensor) and _alike(first, item):
        with torch.no_grad():
            first.detach().copy_(item)
        return first
    if type(item) is type(first) is np.ndarray and (item.dtype, item.shape) == (first.dtype, first.shape):
        first[...] = item
        return first
    return item


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        plain_tensor(one)
        and plain_tensor(other)
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    )
