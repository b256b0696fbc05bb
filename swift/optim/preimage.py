"""Undo by copies: parameters and their state, taken before a bucket is applied. For any optimizer; dear."""

from typing import Any

import torch

from swift.optim import torch_names as many
from swift.optim.error import squares


class PreImage:
    """(journal) before the step ``PreImage(...)`` → the optimizer's step → ``undo()``

    `whole` also takes what an unknown class may keep elsewhere: the groups' values and its own plain attributes.
    """

    exact = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], *, whole: bool
    ):
        self._optimizer = optimizer
        self.parameters = parameters
        with torch.no_grad():
            self.values = [parameter.detach().clone() for parameter in parameters]
        self._state = {p: _Copy(optimizer.state[p]) for p in parameters if p in optimizer.state}
        self._around: list[tuple[dict[str, Any], _Copy]] = []
        if whole:
            groups: list[dict[str, Any]] = optimizer.param_groups
            self._around = [(group, _Copy(_without(group, "params"))) for group in groups]
            own = {name: value for name, value in vars(optimizer).items() if name not in _BASE}
            self._around.append((vars(optimizer), _Copy(own)))

    @property
    def extra_bytes(self) -> int:
        """Bytes that are held until the next step."""
        return _size(self.values) + sum(copy.bytes for copy in self._state.values())

    def after(self) -> None:
        """Nothing: all was taken before."""

    def distances(self) -> list[float]:
        """Squared distance of each parameter from its copy."""
        return [squares(p.detach(), value) for p, value in zip(self.parameters, self.values, strict=True)]

    def undo(self) -> None:
        with torch.no_grad():
            if self.values:
                many.copy_([p.detach() for p in self.parameters], self.values)
            for parameter in self.parameters:
                if parameter in self._state:
                    self._optimizer.state[parameter] = self._state[parameter].put_back()
                else:
                    self._optimizer.state.pop(parameter, None)
            for holder, copy in self._around:
                holder.update(copy.put_back())


# What torch.optim.Optimizer itself keeps; the step does not change it, or it is taken apart.
_BASE = frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))) | {"step"}


def _without(group: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != name}


def _size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Copy:
    """A dictionary as it was: its tensors' values go back into the same tensors, numbers are put back."""

    def __init__(self, value: dict[Any, Any]):
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._value = self._take(value)

    @property
    def bytes(self) -> int:
        return _size([copy for _, copy in self._tensors])

    def put_back(self) -> dict[Any, Any]:
        for tensor, copy in self._tensors:
            tensor.detach().copy_(copy)
        value: dict[Any, Any] = self._again(self._value)
        return value

    def _take(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):
            return value
        if isinstance(value, torch.Tensor):
            self._tensors.append((value, value.detach().clone()))
            return value
        return self._walk(value, self._take)

    def _again(self, value: Any) -> Any:
        return value if isinstance(value, torch.Tensor) else self._walk(value, self._again)

    def _walk(self, value: Any, visit: Any) -> Any:
        """Containers anew, so that the optimizer cannot change ours; everything else as it is."""
        if type(value) in (list, tuple):
            return type(value)(visit(item) for item in value)
        if type(value) is dict:
            return {key: visit(item) for key, item in value.items()}
        return value
