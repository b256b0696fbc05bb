"""The gradients of single additions, kept apart so that they can be added in the order in which one process would.

Floating point addition is not associative: gradients have the same bits only if the same numbers are added to `.grad`
in the same order. What autograd adds is not one number for each microbatch: a parameter that is used in several blocks
with reentrant activation checkpointing is added to several times in one backward. So it is not the gradient of a
microbatch that is kept but every single addend, taken in the hook that autograd calls behind each of its additions.
"""

from collections.abc import Callable, Sequence

import torch


class Addends:
    """What autograd adds to the gradients of `parameters` from here to `close`, in its order; `.grad` stays None."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self.of: list[list[torch.Tensor]] = [[] for _ in parameters]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._taker(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def _taker(self, index: int) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.of[index].append(parameter.grad)
            parameter.grad = None

        return take

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def added(total: torch.Tensor | None, addends: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """As autograd does it: the first gradient is taken as it is (0 + -0.0 would be 0.0), others are added in place."""
    for addend in addends:
        if total is None:
            total = addend
        else:
            total.add_(addend)
    return total
