"""Collectives over a pipeline that lacks ranks, behind the reduction of gradients.

Until its gradients are reduced, a step is carried out for each origin by all ranks of its route
(`swift.runtime.groups`), so a collective over the pipeline has all its parts. Behind that each rank does its own step
alone, and nobody sits in the places of those that are missing. So a rank whose pipeline lacks some takes what a whole
pipeline has computed, from the rank of its own stage there. Of what comes of averaged gradients and of weights (a norm,
tied weights) that is the same, bit for bit. Of anything else (a loss) it is another pipeline's.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from swift.recovery import Assignment
from swift.runtime.backends.base import Collectives
from swift.runtime.config import SessionConfig
from swift.runtime.differences import Differences

if TYPE_CHECKING:
    from swift.runtime.groups import ReconfigurableGroup


class Answers:
    """One rank's. Trainer's thread."""

    def __init__(
        self,
        slot: int,
        assignment: Callable[[], Assignment],
        data: "ReconfigurableGroup",
        differences: Differences,
        config: SessionConfig,
    ) -> None:
        """`assignment`: of this generation. `data`: the ranks of this stage. If the job reroutes, microbatches do not
        pass along pipelines (`swift.runtime.rerouting`), so the representatives of the stages answer, at any time of a
        step."""
        self._slot = slot
        self._assignment = assignment
        self._data = data
        self._differences = differences
        self._config, self._reroutes = config, config.reroutes
        self._named = False
        self.early = False
        """(rerouting) A step is carried out for another origin, and has not called its schedule yet."""
        self.reduced = False
        """(adoption) The gradients of the step under way are being reduced, or are."""

    @property
    def asked(self) -> bool:
        """Some pipelines lack ranks, and nobody sits in their places any more."""
        assignment = self._assignment()
        return (self.reduced or self._reroutes) and bool(assignment.adopted) and assignment.stage_groups > 1

    def into(self, results: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        """`run` leaves its result in `results`; so does this, on the ranks of all pipelines. Raises UsageError."""
        if self.early:
            raise self._config.not_shared(
                "and a train_step that communicates over its pipeline before it calls the schedule: for a lost rank "
                "not all of its pipeline take part",
                "do it behind the call",
            )
        if not self.asked:
            run()
            return
        assignment = self._assignment()
        group = assignment.group(self._slot)
        if self._reroutes:
            have = {group[0]}
        else:
            whole = assignment.whole_origins()
            have = {slot for slot in group if assignment.slots[slot].dp_rank in whole}
        gives = group.index(min(have))
        if self._slot in have:
            run()
        # Each keeps what it has itself: of other pipelines it may be something else.
        passed = [result.detach().clone() for result in results]

        def pass_on(collectives: Collectives) -> None:
            for tensor in passed:
                collectives.broadcast(tensor, gives)

        self._data.run(pass_on)
        if self._slot not in have:
            for result, tensor in zip(results, passed, strict=True):
                result.detach().copy_(tensor)

    def trainers(self, step: int) -> None:
        """The trainer communicates by itself: what it gets may depend on the batch."""
        if self.asked:
            self.name(
                step, "the result of a collective of train_step behind the update was another pipeline's"
            )

    def name(self, step: int, words: str) -> None:
        """The job is not exact from there on; said once."""
        if not self._named:
            self._named = True
            self._differences.say(step, words)
