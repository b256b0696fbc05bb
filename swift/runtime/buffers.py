"""A module's buffers as they were: what a forward did to them can be taken back."""

import torch

from swift.runtime.tensors import same_bits


class Buffers:
    """``Buffers(module)`` … ``changed``, ``put_back()``.

    A forward may change a buffer in place, or bind another tensor to its name (``self.mean = 0.9 * self.mean + …``),
    or make one (a cache). So it is the names that are kept, and what was bound to them.
    """

    def __init__(self, module: torch.nn.Module):
        self._bound = [(owner, dict(owner._buffers)) for owner in module.modules()]
        tensors = dict.fromkeys(b for _, named in self._bound for b in named.values() if b is not None)
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @property
    def changed(self) -> bool:
        """In place, or bound anew: to the same bits or not."""
        return any(
            owner._buffers.keys() != named.keys() or any(owner._buffers[n] is not named[n] for n in named)
            for owner, named in self._bound
        ) or not all(same_bits(tensor, value) for tensor, value in self._values)

    @torch.no_grad()
    def put_back(self) -> None:
        for owner, named in self._bound:
            owner._buffers.clear()
            owner._buffers.update(named)
        for tensor, value in self._values:
            tensor.copy_(value)
