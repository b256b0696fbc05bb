"""Who is told of what passes over a group, and who decides on it. `swift.runtime.gate` is both."""

from typing import Protocol

import torch

from swift.runtime.backends.base import Collective


class Step(Protocol):
    """Is told of what passes over a group (`swift.runtime.gate`)."""

    def used(self, ranks: int) -> None:
        """Torch, or a trainer, communicates over it. `ranks`: how many it has in a full world."""

    def reducing(self) -> None:
        """A reduction that torch has asked for is under way."""


class Group(Protocol):
    """The group that it passes over."""

    ranks: tuple[int, ...]

    def run(self, run: Collective) -> None: ...


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
