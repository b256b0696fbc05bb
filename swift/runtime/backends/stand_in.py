"""Connections to nobody: whatever a group does together is answered as if every member had what this one has.

Results have the right shapes, and meaningless values. For a spare that computes a step to be warm
(`swift.runtime.warming`).
"""

from collections.abc import Sequence

import torch

from swift.runtime.backends.base import Collective, Pending
from swift.runtime.backends.ordered import Alone
from swift.runtime.backends.runner import Task


class StandIn:
    """See `base.Connections`."""

    def __init__(self, own: int) -> None:
        """`own`: this process's place among the members."""
        self._own = own

    def circuit(self, places: Sequence[int], number: int, label: str) -> "_Circuit":
        """As `base.Connections.circuit`."""
        return _Circuit(places.index(self._own), len(places), label)


class _Circuit:
    """See `base.Circuit`. What is submitted is done when the call returns."""

    def __init__(self, own: int, n: int, label: str) -> None:
        self._alone = Alone(own, n)
        self._label = label

    def submit(self, run: Collective) -> Task:
        task = Task(lambda: run(self._alone))
        task.carry_out()
        return task

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        raise RuntimeError(f"process group {self._label}: nobody is there for a message, in a warm-up")

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        return self.send(tensors, source, tag)
