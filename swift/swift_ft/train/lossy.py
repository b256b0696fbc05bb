"""A step that a loss cuts short in the reduction of its gradients, and that is finished with those that are left.

Strategy "lossy-forward". The step is not unwound: it stays on the trainer's stack while this rank takes part in the
recovery, as it does in the commit vote (`Engine.vote`)::

    (a reduction, or the vote) ``through`` → a notice → ``held_over`` (the engine): reported, planned, groups built
        → the plan drops the step                              raised from there
        → all that are left have all averages                  nothing more is needed: the step is finished
        → they are all in the step                             ``_agree``, then the rest of it, with them

What ranks agree on is `swift_ft.train.lossy`. An average is kept until the step ends: whoever lacks it gets it from
there, and not from gradients that the trainer may have clipped since. Memory: a copy of the gradients.

A bucket's contributors are the data-parallel ranks of the generation in which it was averaged, and its divisor is their
number. A step that was cut short tells both of every bucket (event "lossy_step").
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from swift_ft import events
from swift_ft.errors import Fenced, JobFailed, UsageError
from swift_ft.planner import Assignment
from swift_ft.state.journal import Journal
from swift_ft.train.errors import Hook
from swift_ft.train.reducer import Reducer, UpdateBucket

# Which buckets of a step that a loss has cut short are averaged already, and who gives them to whom.
#
# A bucket is averaged in one generation, over the ranks that were in it. Some of them have the result, and the loss has
# come before others had it. Whoever is left agrees on these (strategy "lossy-forward"):
#
#     somebody has it    it stays: all that lack it get the same bits from one who has it
#     nobody has it      it is averaged anew, over those that are left
#
# So a bucket that was averaged in one generation is averaged in no later one, as long as somebody has it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """An average that some have and others lack."""

    bucket: int
    generation: int
    """In which it was averaged: over its ranks, by their number."""
    source: int
    """The place of the one that gives it."""
    to: frozenset[int]
    """The places of those that lack it."""


def given(held: Sequence[Sequence[int]]) -> list[Given]:
    """`held`: of each rank that is left, by its place, the generation in which each bucket was averaged, or 0.

    Whoever gives is the first that has it. ValueError: no such step can be, and nothing that is done now would lead to
    one state.
    """
    if len({len(generations) for generations in held}) != 1:
        raise ValueError("ranks of one step have other buckets")
    gifts = []
    for bucket, of_places in enumerate(zip(*held, strict=True)):
        if len(set(of_places) - {0}) > 1:
            raise ValueError(f"bucket {bucket} was averaged in generations {sorted(set(of_places) - {0})}")
        having = [place for place, generation in enumerate(of_places) if generation]
        lacking = frozenset(place for place, generation in enumerate(of_places) if not generation)
        if having and lacking:
            source = having[0]
            gifts.append(Given(bucket=bucket, generation=of_places[source], source=source, to=lacking))
    return gifts


class World(NamedTuple):
    """Of a generation, as far as averages are concerned."""

    generation: int
    contributors: tuple[int, ...]
    """Data-parallel ranks, ascending."""
    divisor: int
    place: int
    """Of this rank, among them."""

    @classmethod
    def of(cls, generation: int, assignment: Assignment, slot: int) -> Self:
        """As the rank in this slot sees it."""
        group, slots = assignment.group(slot), assignment.slots
        divisor = assignment.contributions(slots[slot].stage_group)
        return cls(generation, tuple(slots[each].dp_rank for each in group), divisor, group.index(slot))


class CutStep:
    """One rank's. Trainer's thread."""

    def __init__(self, wanted: bool, rank: int, reducer: Reducer | None, world: Callable[[], World]) -> None:
        """`wanted`: steps that are cut short are finished. `world`: of this generation."""
        self.wanted = wanted and reducer is not None
        self._rank = rank
        self._reducer = reducer
        self._world = world
        self.held_over: Hook[[Exception], bool] = Hook("CutStep.held_over")
        """(engine) From the error that a loss has left to groups of a newer generation. Returns whether the step is to
        be finished together; False: whoever is left has all averages. Raises if it is not to be finished."""
        self.given_up: Hook[[], None] = Hook("CutStep.given_up")
        """(updates) Of what was under way, nothing is."""
        self._worlds: dict[int, World] = {}
        """Those in which this step was reduced, by their generations."""
        self.buckets: Sequence[UpdateBucket] = ()
        """(updates) Those of the step under way."""
        self._disagree = False
        """The ranks of this generation may have other averages."""
        self._own = False
        self.was_cut = False
        self.waits = False
        """This rank holds the step over, with all its gradients or a part of them averaged."""

    def begin(self) -> None:
        """Another step begins."""
        for bucket in self.buckets:
            if bucket.average is not None and self._reducer is not None:
                self._reducer.reuse(bucket.average)
            bucket.begin()
        self._worlds = {}
        self._disagree = self._own = self.was_cut = self.waits = False

    def check(self, journals: Sequence[Journal]) -> None:
        """(all is registered) Raises UsageError for optimizers whose steps cannot be finished so."""
        if not self.wanted:
            return
        if len(journals) > 1:
            raise UsageError(
                "strategy='lossy-forward' with several optimizers: a step that was cut short is finished from its one "
                "reduction; use one optimizer with several param_groups, or strategy='rollback'"
            )
        if any(journal.whole for journal in journals):
            raise UsageError(
                "strategy='lossy-forward' with an optimizer that computes gradients in its step (LBFGS): use "
                "strategy='rollback'"
            )

    def check_recut(self) -> None:
        """(the optimizer has other parameters) Raises UsageError behind the reduction of its gradients."""
        if any(bucket.averaged_in for bucket in self.buckets):
            raise UsageError(
                "strategy='lossy-forward' and an optimizer that is given other parameters behind the reduction of its "
                "gradients: a step that was cut short is finished from its one reduction; do it before that"
            )

    def check_step(self, stepped: int) -> None:
        """(the trainer's step has returned) Raises UsageError for one that cannot be finished so."""
        if self.wanted and stepped > 1:
            raise UsageError(
                "strategy='lossy-forward' and a train_step that updates twice: a step that was cut short is finished "
                "from its one reduction; make two steps of it, or use strategy='rollback'"
            )

    def through(self, work: Callable[[], None]) -> bool:
        """Does what needs all ranks, and does it again with those that are left. False: it is not needed any more, as
        all of them have all averages."""
        while True:
            try:
                if self._disagree:
                    self._agree()
                work()
                return True
            except (JobFailed, Fenced, UsageError):
                raise
            except Exception as error:
                if not self.wanted or self._own:
                    raise
                self.was_cut = self.waits = True
                try:
                    self._disagree = self.held_over(error)
                finally:
                    self.waits = False
            if not self._disagree:
                return False

    @contextmanager
    def own(self) -> Iterator[None]:
        """Around what needs no other rank: an error in it is no loss's."""
        self._own = True
        yield
        self._own = False

    def launch(self, bucket: UpdateBucket, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Starts the average of the bucket, unless it is averaged already. `parameters`: those of it to average."""
        assert self._reducer is not None
        if bucket.averaged_in or not parameters:
            return
        bucket.reduction = self._reducer.launch(parameters)
        if self.wanted:
            world = self._world()
            self._worlds[world.generation] = world
            bucket.launched_in = world.generation

    def finish(self, bucket: UpdateBucket) -> None:
        """Waits for the bucket's average, which is in its gradients then."""
        assert self._reducer is not None
        if bucket.reduction is not None:
            self._reducer.finish(bucket.reduction, kept=self.wanted)
            if self.wanted:
                bucket.averaged_in, bucket.average = bucket.launched_in, bucket.reduction.flat
        bucket.reduction = None
        bucket.averaged.update(bucket.parameters)

    def tell(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """(the step is finished) What became of a step that was cut short; parameters in their optimizer's order."""
        if not self.was_cut:
            return
        parameters = [
            p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        number = {parameter: index for index, parameter in enumerate(parameters)}
        told = [
            {
                "parameters": [number[parameter] for parameter in bucket.parameters],
                "contributors": list(self._worlds[bucket.averaged_in].contributors),
                "divisor": self._worlds[bucket.averaged_in].divisor,
            }
            for bucket in self.buckets
            if bucket.averaged_in
        ]
        events.emit("lossy_step", rank=self._rank, step=step, buckets=told)

    # --- ---

    def _agree(self) -> None:
        """(all that are left) Everybody has the averages that anybody has. Raises RuntimeError if another is lost."""
        assert self._reducer is not None
        for bucket in self.buckets:
            # It was begun in a generation that is over; its end may have come before the notice.
            if bucket.reduction is not None and bucket.reduction.succeeded:
                self.finish(bucket)
            bucket.reduction = None
        own = torch.tensor([bucket.averaged_in for bucket in self.buckets])
        held = [of_one.tolist() for of_one in self._reducer.gathered(own)]
        for gift in given(held):
            bucket = self.buckets[gift.bucket]
            # Who has it already must not lose it to a broadcast that is cut short in its turn.
            average = bucket.average if gift.source == self._world().place else None
            average = self._reducer.given(bucket.parameters, average, gift.source)
            if not bucket.averaged_in:
                self._reducer.write_average(bucket.parameters, average)
                bucket.averaged_in, bucket.average = gift.generation, average
                bucket.averaged.update(bucket.parameters)
        self._disagree = False
        self.given_up()
