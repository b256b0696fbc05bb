"""Gradients of several batches at one rank, each as its own rank would have accumulated it.

autograd adds to ``parameter.grad``, in the order in which backwards come. Here microbatches of several origins come
mixed, and not always in their order: a later one may be there first. A floating-point sum has other bits then. So each
origin has an accumulator of its own, and a microbatch that comes early is kept apart until its turn.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch

Gradients = dict[torch.nn.Parameter, torch.Tensor]


class Accumulator:
    """Of some parameters: the sum over `microbatches`, in this order.

    ``with accumulator.adding(microbatch): …backward…`` for each of them, in any order.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        microbatches: Sequence[int],
        *,
        own: bool,
        begun: Mapping[torch.nn.Parameter, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """`own`: it is what ``parameter.grad`` is between two microbatches; else ``gradients``, which begin with
        `begun`."""
        self._parameters = list(parameters)
        self._turns = list(microbatches)
        self._own = own
        self._early: dict[int, Gradients] = {}
        self.gradients: Gradients = {p: begun[p] for p in self._parameters if p in begun}

    @contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        """Around what computes gradients of weights of this microbatch."""
        in_turn = self._turns[:1] == [microbatch]
        if in_turn and self._own:
            yield
        else:
            into = self.gradients if in_turn else self._early.setdefault(microbatch, {})
            with self._instead(into):
                yield
        if in_turn:
            del self._turns[0]
            self._catch_up()

    @contextmanager
    def _instead(self, into: Gradients) -> Iterator[None]:
        """What autograd adds to is this."""
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = into.get(parameter)
        try:
            yield
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                if parameter.grad is not None:
                    into[parameter] = parameter.grad
                parameter.grad = gradient

    def _catch_up(self) -> None:
        """Adds what came early and has its turn now, as autograd does."""
        while self._turns and self._turns[0] in self._early:
            early = self._early.pop(self._turns.pop(0))
            if self._own:
                _add({p: p.grad for p in early if p.grad is not None}, early, own=True)
            else:
                _add(self.gradients, early, own=False)


def _add(to: Gradients, early: Mapping[torch.nn.Parameter, torch.Tensor], *, own: bool) -> None:
    for parameter, gradient in early.items():
        if parameter in to:
            to[parameter].add_(gradient)
        elif own:
            parameter.grad = gradient
        else:
            to[parameter] = gradient
