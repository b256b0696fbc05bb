"""A whole model, trained without a pipeline."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from swift.runtime import _torch
from swift.runtime.rng import Randomness


class WholeModule:
    """A module that is no pipeline stage: what the session does with a stage's state, without a boundary.

    A rank may have several (a generator and a discriminator): all are the one stage of a pipeline of one.
    """

    stage_index, num_stages = 0, 1
    stage_index_to_group_rank: Mapping[int, int] = MappingProxyType({0: 0})
    grad_scale = 1

    def __init__(self, module: torch.nn.Module):
        self.submod = module
        self.last_backward = True  # False while gradients are only accumulated
        self._forwards = 0

    def seeded_by(self, randomness: Randomness, number: int) -> None:
        """Each forward begins with generators of its own: what was drawn before, and how often, does not count."""

        def before_forward() -> None:
            randomness.whole(number, self._forwards)
            self._forwards += 1

        _torch.before_forward(self.submod, before_forward)

    def begin_step(self) -> None:
        self._forwards = 0

    def streams_read(self) -> list[str]:
        """(replay) Nothing: it has no neighbours."""
        return []
