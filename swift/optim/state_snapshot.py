"""A dictionary as it was, and as it will be again."""

import copy
import random
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

# What torch.optim.Optimizer itself keeps; the step does not change it, or it is taken apart.
OPTIMIZERS_OWN = frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))) | {"step"}


class Kept:
    """``Kept(holder)`` … ``put_back()``

    Values of tensors go back into the same tensors, numbers and containers into `holder`; what is there besides by then
    goes. Keys keep their order: a state's keys are told in theirs. `but`: keys that are left alone. Generators of
    random numbers go back to their states, and so does an optimizer around which another one is built (SAM, Lookahead);
    unless `states`, without its state: that is as large as the parameters, and changes in its step alone.
    """

    def __init__(
        self,
        holder: dict[Any, Any],
        *,
        but: Collection[Any] = (),
        states: bool = True,
        seen: frozenset[int] = frozenset(),
    ):
        """`seen`: ids of optimizers that are kept already."""
        self._holder = holder
        self._states = states
        self._seen = seen
        self._but = frozenset(but)
        self._order = list(holder)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._optimizers: list[Kept] = []
        self._value = {key: self._take(value) for key, value in holder.items() if key not in self._but}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The copies that are held."""
        return [copied for kept in (self, *self._optimizers) for _, copied in kept._tensors]

    @torch.no_grad()
    def put_back(self) -> dict[Any, Any]:
        """Gives `holder`."""
        for tensor, copied in self._tensors:
            tensor.copy_(copied)
        for generator, state in self._generators:
            _set_state(generator, state)
        for kept in self._optimizers:
            kept.put_back()
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
        elif isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
            self._generators.append((value, _state_of(value)))
        elif isinstance(value, torch.optim.Optimizer) and id(value) not in self._seen:
            seen = self._seen | {id(value)}
            self._optimizers += [Kept(group, but=("params",)) for group in value.param_groups]
            self._optimizers += [Kept(value.state)] if self._states else []
            self._optimizers += [Kept(vars(value), but=OPTIMIZERS_OWN, states=self._states, seen=seen)]
        return value


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


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
