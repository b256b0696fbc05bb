"""Two ways in which the gradients of a rank's microbatches get into the sum that goes along the line.

    ordered   each of autograd's additions by itself, behind those that come from before: the bits of one process
    fast      autograd adds this rank's own up while it computes; along the line go sums of such sums

Both go along the same line: the owner alone needs the sum, and a line brings it there in G bytes, bucket by bucket. (An
all-reduce gives it to everybody, for 2 (d - 1) / d G out of and into each rank.)
What `fast` saves lies behind the last backward: one addition on each rank instead of one for each microbatch, and the
memory of those that wait for it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from swift.runtime.shared_replay.gradients import Addends

FAST_SHARE = 1
"""So many microbatches' gradients, at most, are kept at once on a rank that adds its own up."""


class OwnGradients:
    """(a rank of the line, each step) from here to `taken`, what its microbatches add to the parameters' gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, first: bool, fast: bool):
        """`first` in the line: its additions are the first ones, and autograd's own sum has the right bits."""
        self._parameters = parameters
        self._apart = None if first or fast else Addends(parameters)

    def taken(self) -> list[list[torch.Tensor]]:
        """What is to be added for each parameter, in order; `.grad` is None again."""
        self.close()
        if self._apart is not None:
            return self._apart.of
        sums = [[] if parameter.grad is None else [parameter.grad] for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return sums

    def weighing(self) -> AbstractContextManager[None]:
        """Around the second part of a split backward."""
        return nullcontext() if self._apart is None else self._apart.weighing()

    def close(self) -> None:
        if self._apart is not None:
            self._apart.close()
