"""Who is told of what passes over a group, and who decides on it. `swift.runtime.gate` is both."""

from collections.abc import Sequence
from typing import Protocol

import torch

from swift.runtime.backends.base import Collective


class Step(Protocol):
    """Is told of what passes over a group (`swift.runtime.gate`)."""

    def used(self, group: "Group") -> None:
        """Torch, or a trainer, carries out a collective over it."""

    def messaged(self) -> None:
        """Torch sends or receives over it."""

    def reducing(self) -> None:
        """A reduction that torch has asked for is under way."""


class Group(Protocol):
    """The group that it passes over."""

    ranks: tuple[int, ...]
    """In a full world."""

    @property
    def is_pipeline(self) -> bool: ...

    def run_into(self, results: Sequence[torch.Tensor], run: Collective) -> None: ...


class Gate(Protocol):
    """Decides on what a trainer communicates over a group (`swift.runtime.gate`)."""

    def collective(
        self,
        group: "Group",
        name: str,
        results: list[torch.Tensor],
        run: Collective,
        *,
        alike: bool,
    ) -> bool: ...

    def message(self, name: str) -> None: ...

    def new_group(self) -> None: ...
