"""The gradients of single additions, kept apart so that they can be added in the order in which one process would.

Floating point addition is not associative: gradients have the same bits only if the same numbers are added to `.grad`
in the same order. What autograd adds is not one number for each microbatch: a parameter that is used in several blocks
with reentrant activation checkpointing is added to several times in one backward. So it is not the gradient of a
microbatch that is kept but every single addend, taken in the hook that autograd calls behind each of its additions.
The weights' part of a split backward calls no hook: torch's pipelining sets `.grad` itself, and there it is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from swift.errors import ReplayRefused

Strides = list[list[int] | None]
"""Of each parameter's gradient; None: it has none."""


class Addends:
    """What is added to the gradients of `parameters` from here to `close`, in its order; `.grad` stays None."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self.of: list[list[torch.Tensor]] = [[] for _ in parameters]
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
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

    @contextmanager
    def weighing(self) -> Iterator[None]:
        """Around the second part of a split backward. Raises ReplayRefused if two parameters share a gradient."""
        before = [len(addends) for addends in self.of]
        with _Setting(self._index, self.of):
            yield
        new = [
            addend.data_ptr()
            for addends, had in zip(self.of, before, strict=True)
            for addend in addends[had:]
            if addend.numel()
        ]
        if len(set(new)) < len(new):  # what torch adds to one of them, it then adds to the other as well
            raise ReplayRefused("a split backward gives two parameters one gradient in the same memory")

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class OwnGradients:
    """(a rank of the line, each step) from here to `taken`, what its microbatches add to the parameters' gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, first: bool):
        """`first` in the line: its additions are the first ones, and autograd's own sum has the right bits."""
        self._parameters = parameters
        self._apart = None if first else Addends(parameters)

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


class _Setting(TorchFunctionMode):
    """`parameter.grad = addend` keeps the addend, and `.grad` None: so the next one is not added to it."""

    def __init__(self, index: dict[int, int], of: list[list[torch.Tensor]]):
        super().__init__()
        self._index, self._of = index, of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_GRADIENT and args[1] is not None and id(args[0]) in self._index:
            self._of[self._index[id(args[0])]].append(args[1])
            return None
        return func(*args, **(kwargs or {}))


_SET_GRADIENT: Any = cast(Any, torch.Tensor.grad).__set__


def added(total: torch.Tensor | None, addends: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """As autograd does it: the first gradient is taken as it is (0 + -0.0 would be 0.0), others are added in place."""
    for addend in addends:
        if total is None:
            total = addend
        else:
            total.add_(addend)
    return total


def first_strides(addends: Sequence[Sequence[torch.Tensor]]) -> Strides:
    """Of the first addend to each parameter, which the sum keeps: autograd lays it out like the parameter, a split
    backward leaves it as it was computed."""
    return [list(addend[0].stride()) if addend else None for addend in addends]


def laid_out(total: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """In memory of its own: what sums over a gradient (a norm) goes by its layout, and so do the sum's bits. Raises
    ReplayRefused for a layout whose elements share memory."""
    room = torch.empty_strided(total.shape, list(strides), dtype=total.dtype, device=total.device)
    try:
        return room.copy_(total)
    except RuntimeError as error:  # elements that share memory
        raise ReplayRefused(f"a gradient with strides {list(strides)}: {error}") from None
