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
        self._numbers: dict[int, int] = {}
        """The state of torch's generator before a forward of this step -> the forward's number."""

    def seeded_by(self, randomness: Randomness, number: int) -> None:
        """Each forward begins with generators of its own: what was drawn before, and how often, does not count. One
        that is computed again in backward (`torch.utils.checkpoint` of the whole module) has those that it had before:
        torch puts the generators back to what they were when the checkpoint was reached."""

        def before_forward() -> None:
            key = _torch.digest_of_generator()
            if _torch.is_in_backward():
                if key in self._numbers:
                    randomness.whole(number, self._numbers[key])
                return
            self._numbers[key] = self._forwards
            randomness.whole(number, self._forwards)
            self._forwards += 1

        _torch.before_forward(self.submod, before_forward)

    def begin_step(self) -> None:
        self._forwards, self._numbers = 0, {}

    def streams_read(self) -> list[str]:
        """(replay) Nothing: it has no neighbours."""
        return []
