"""Strategy "lossy-forward": finishes a step that a failure interrupts in the reduction of its gradients.

The remaining ranks finish it. The step is not unwound: it stays on the trainer's stack while this rank takes part in
the recovery, as in the commit vote (`Engine.vote`)::

    (a reduction, or the vote) ``through`` → new generation → ``held_over`` (the engine): report, plan, groups built
        → the plan drops the step                              raises
        → all remaining ranks have all averages                the step is finished: no more communication
        → all remaining ranks are in the step                  ``_agree``, then the rest of the step, with them

An average is kept until the step ends. A rank that lacks it receives this copy, because the trainer may have clipped
the gradients since. Memory: a copy of the gradients.

A bucket's contributors are the data-parallel ranks of the generation in which it was averaged. Its divisor is their
number. An interrupted step reports both for every bucket (event "lossy_step").
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
from swift_ft.train.reducer import Reducer, UpdateBucket

# Agreement on the averaged buckets of an interrupted step, and on the ranks that send them to others.
#
# A bucket is averaged in one generation, over that generation's ranks. After a failure, some ranks may have the result
# and others not. The remaining ranks agree for each bucket:
#
#     some rank has it   the average stands: ranks that lack it receive the same bits from one that has it
#     no rank has it     the bucket is averaged again, over the remaining ranks
#
# So a bucket averaged in one generation is not averaged again in a later one while any rank has the result.


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A bucket's average that some ranks have and others lack."""

    bucket: int
    generation: int
    """Generation over whose ranks the bucket was averaged."""
    source: int
    """Place of the rank that sends the average."""


def given(held: Sequence[Sequence[int]]) -> list[Given]:
    """Returns the averages to send. `held` [places][buckets]: generation in which the bucket was averaged, or 0.

    The source is the first rank that has the average. Raises ValueError if `held` is inconsistent, so that the ranks
    cannot reach a common state.
    """
    if len({len(generations) for generations in held}) != 1:
        raise ValueError("ranks of one step have other buckets")
    gifts = []
    for bucket, of_places in enumerate(zip(*held, strict=True)):
        if len(set(of_places) - {0}) > 1:
            raise ValueError(f"bucket {bucket} was averaged in generations {sorted(set(of_places) - {0})}")
        having = [place for place, generation in enumerate(of_places) if generation]
        if having and len(having) < len(of_places):
            gifts.append(Given(bucket=bucket, generation=of_places[having[0]], source=having[0]))
    return gifts


class World(NamedTuple):
    """Ranks over which a generation averages gradients."""

    generation: int
    contributors: tuple[int, ...]
    """Data-parallel ranks, ascending."""
    divisor: int
    place: int
    """This rank's index among the contributors."""

    @classmethod
    def of(cls, generation: int, assignment: Assignment, slot: int) -> Self:
        group, slots = assignment.group(slot), assignment.slots
        divisor = assignment.contributions(slots[slot].stage_group)
        return cls(generation, tuple(slots[each].dp_rank for each in group), divisor, group.index(slot))


class CutStep:
    """One rank's part in finishing interrupted steps. Used by the trainer's thread."""

    def __init__(self, wanted: bool, rank: int, reducer: Reducer | None, world: Callable[[], World]) -> None:
        """`wanted`: interrupted steps are finished. `world` returns this generation's."""
        self.wanted = wanted and reducer is not None
        self._rank = rank
        self._reducer = reducer
        self._world = world
        self.held_over: Callable[[Exception], bool]
        """(engine) Recovers from the error of a failure until a newer generation's groups are built. Returns True if
        the ranks are to finish the step together, False if all remaining ranks have all averages. Raises if the plan
        drops the step."""
        self.given_up: Callable[[], None]
        """(updates) Called after the agreement: no reduction is in progress any more."""
        self._worlds: dict[int, World] = {}
        """Worlds in which this step's buckets were reduced, by generation."""
        self.buckets: Sequence[UpdateBucket] = ()
        """(updates) Buckets of the current step."""
        self._disagree = False
        """Set while ranks of this generation may hold different sets of averages."""
        self._own = False
        self.was_cut = False
        self.waits = False
        """Set while this rank holds an interrupted step, with some or all of its gradients averaged."""

    def begin(self) -> None:
        """Resets for a new step, and releases the kept averages of the last one."""
        for bucket in self.buckets:
            if bucket.average is not None and self._reducer is not None:
                self._reducer.reuse(bucket.average)
            bucket.begin()
        self._worlds = {}
        self._disagree = self._own = self.was_cut = self.waits = False

    def check(self, journals: Sequence[Journal]) -> None:
        """(after registration) Raises UsageError for optimizers whose interrupted steps cannot be finished."""
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
        """(the optimizer's parameters have changed) Raises UsageError after the reduction of its gradients."""
        if any(bucket.averaged_in for bucket in self.buckets):
            raise UsageError(
                "strategy='lossy-forward' and an optimizer that is given other parameters behind the reduction of its "
                "gradients: a step that was cut short is finished from its one reduction; do it before that"
            )

    def check_step(self, stepped: int) -> None:
        """(the trainer's step has returned) Raises UsageError if it could not have been finished if interrupted."""
        if self.wanted and stepped > 1:
            raise UsageError(
                "strategy='lossy-forward' and a train_step that updates twice: a step that was cut short is finished "
                "from its one reduction; make two steps of it, or use strategy='rollback'"
            )

    def through(self, work: Callable[[], None]) -> bool:
        """Runs `work`, which needs all ranks, and repeats it with the remaining ranks after a failure. Returns False if
        it is no longer needed, because all of them have all averages."""
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
        """Encloses local work: an error in it is not the consequence of a rank's failure."""
        self._own = True
        yield
        self._own = False

    def launch(self, bucket: UpdateBucket, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Starts averaging the bucket's `parameters`, unless the bucket is averaged already."""
        assert self._reducer is not None
        if bucket.averaged_in or not parameters:
            return
        bucket.reduction = self._reducer.launch(parameters)
        if self.wanted:
            world = self._world()
            self._worlds[world.generation] = world
            bucket.launched_in = world.generation

    def finish(self, bucket: UpdateBucket) -> None:
        """Waits until the bucket's average is in its gradients."""
        assert self._reducer is not None
        if bucket.reduction is not None:
            self._reducer.finish(bucket.reduction, kept=self.wanted)
            if self.wanted:
                bucket.averaged_in, bucket.average = bucket.launched_in, bucket.reduction.flat
        bucket.reduction = None
        bucket.averaged.update(bucket.parameters)

    def emit_step(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """(after the step) Emits "lossy_step" if it was interrupted; parameters are numbered in optimizer order."""
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
        """(all remaining ranks) Sends every average that a rank has to those that lack it. Raises RuntimeError if
        another rank is lost."""
        assert self._reducer is not None
        for bucket in self.buckets:
            # The reduction began in an earlier generation, but may have ended before the interrupt.
            if bucket.reduction is not None and (task := bucket.reduction.task).done and task.error is None:
                self.finish(bucket)
            bucket.reduction = None
        own = torch.tensor([bucket.averaged_in for bucket in self.buckets])
        held = [of_one.tolist() for of_one in self._reducer.group.gathered(own)]
        for gift in given(held):
            bucket = self.buckets[gift.bucket]
            # A rank that has the average must not lose it if this broadcast is interrupted as well.
            average = bucket.average if gift.source == self._world().place else None
            average = self._reducer.given(bucket.parameters, average, gift.source)
            if not bucket.averaged_in:
                self._reducer.write(bucket.parameters, average)
                bucket.averaged_in, bucket.average = gift.generation, average
                bucket.averaged.update(bucket.parameters)
        self._disagree = False
        self.given_up()
