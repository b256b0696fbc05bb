"""Undo by copies: parameters and their state, taken before a bucket is applied. For any optimizer; dear."""

import torch

from swift.optim import torch_names as many
from swift.optim.error import squares
from swift.optim.state_snapshot import OPTIMIZERS_OWN, Kept


class PreImage:
    """(journal) before the step ``PreImage(...)`` → the optimizer's step → ``undo()``

    `whole` also takes what an unknown class may keep elsewhere: the groups' values, state of no parameter, and its own
    plain attributes.
    """

    exact = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], *, whole: bool
    ):
        self._optimizer = optimizer
        self.parameters = parameters
        with torch.no_grad():
            self.values = [parameter.detach().clone() for parameter in parameters]
        self._state = {p: Kept(optimizer.state[p]) for p in parameters if p in optimizer.state}
        self._around: list[Kept] = []
        if whole:
            self._around = [Kept(group, but=("params",)) for group in optimizer.param_groups]
            self._around += [Kept(optimizer.state, but=parameters), Kept(vars(optimizer), but=OPTIMIZERS_OWN)]

    @property
    def extra_bytes(self) -> int:
        """Bytes that are held until the next step."""
        return _size(self.values) + sum(_size(kept.tensors) for kept in self._state.values())

    def after(self) -> None:
        """Nothing: all was taken before."""

    def distances(self) -> list[float]:
        """Squared distance of each parameter from its copy."""
        return [squares(p.detach(), value) for p, value in zip(self.parameters, self.values, strict=True)]

    def undo(self) -> None:
        """Puts parameters, their state and what the optimizer keeps besides back to the copies."""
        with torch.no_grad():
            if self.values:
                many.copy_([p.detach() for p in self.parameters], self.values)
            for parameter in self.parameters:
                if parameter in self._state:
                    self._optimizer.state[parameter] = self._state[parameter].put_back()
                else:
                    self._optimizer.state.pop(parameter, None)
            for kept in self._around:
                kept.put_back()


def _size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
