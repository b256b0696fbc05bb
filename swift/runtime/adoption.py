"""Batches of data-parallel ranks whose slots are vacant, computed by those that are left.

Before its own step a rank carries out the trainer's step once for each origin that it has adopted, up to the first
reduction of gradients. Then it takes that step back, as a failure would, and keeps the gradients. In the reduction of
its own step they are added in the order of origins (`swift.runtime.reducer`). So the mean has the bits that it has in a
full world.

In a pipeline the ranks of an origin's route do so together: those of its own data-parallel rank that are left, in their
own step, and those of a whole pipeline in the places of the others (`Assignment.redistributed`). Nobody waits in a
circle: who adopts is in a whole pipeline, and does its own step last.

    (engine)  ``check`` once → ``arm`` in each generation
    (steps)   ``before`` every step → (reducer) ``shares`` → ``after`` it

That works if a step takes from `session.dp_rank`, and from loaders made by `session.loader`, whatever belongs to one
data-parallel rank alone. It is tried out before the first step, and in a generation with a process that is new: each
rank computes its own gradients and those of the next data-parallel rank, and all compare what they have. Memory: a copy
of the gradients for each origin that is adopted.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import TypeVar

import torch
import xxhash

from swift import events
from swift.recovery import Assignment
from swift.runtime import _torch
from swift.runtime.answers import Answers
from swift.runtime.channel import Channel
from swift.runtime.config import SessionConfig
from swift.runtime.differences import Differences
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.origin_loaders import OriginLoaders
from swift.runtime.reducer import Row, Shares, Whole, check_dense
from swift.runtime.state import TrainerState
from swift.runtime.tensors import byte_view, plain
from swift.runtime.witness import Witness

Gradients = Mapping[torch.nn.Parameter, torch.Tensor]
_DIGEST_BYTES = 16


Result = TypeVar("Result")


class Computed(Exception):
    """What is wanted of that origin's step is there: its gradients, which are not yet reduced, or its inputs."""


class Adoption:
    """One rank's. Trainer's thread."""

    reroute: Callable[..., object] | None = None
    """What carries out calls of a schedule in which ranks are missing (`swift.runtime.rerouting`)."""

    def __init__(
        self,
        config: SessionConfig,
        slot: int,
        channel: Channel,
        state: TrainerState,
        assignment: Callable[[], Assignment],
        groups: Mapping[str, ReconfigurableGroup],
        world: ReconfigurableGroup,
        witness: Witness,
        differences: Differences,
    ) -> None:
        """`assignment`: of this generation. `groups`: those of the trainer, by name.
        `world`: all ranks, for the session itself."""
        self._config = config
        self._wanted = config.redistributes
        self._data, self._pipeline, self._world = groups["data"], groups["pipeline"], world
        self._answers = self._pipeline.answers = Answers(slot, assignment, self._data, differences, config)
        self._slot = slot
        self._channel = channel
        self._state = state
        self.loaders = OriginLoaders()
        self._assignment = assignment
        self._witness = witness
        self._differences = differences
        self._begins = False
        """A generation does, and nobody has asked yet whether all have tried it out."""
        self._tried = False
        self._at_start = True
        """The job has done no step yet, so that it can still be refused."""
        self.under_way = False
        """A step that is taken back, for the gradients of one origin."""
        self._told_apart: set[str] = set()
        self._gradients: list[Gradients] = []
        """Of this step, by adopted origin, ascending."""
        state.updates.before_reduction.bind(self._before_reduction)

    def check(self) -> None:
        """(all is registered) Raises UsageError for a trainer whose steps cannot be carried out for another rank."""
        updates = self._state.updates
        if not self._wanted:
            return
        if len(updates.optimizers) > 1:
            raise self._config.not_shared(
                "with several optimizers: only what comes before the first reduction is computed for a lost rank",
                f"use one optimizer with several param_groups, or {self._for_others()}",
            )
        if any(journal.whole for journal in updates.journals):
            raise self._config.not_shared(
                "with an optimizer that computes gradients in its step (LBFGS)", f"use {self._for_others()}"
            )

    def arm(self, *, at_start: bool) -> None:
        """Another generation goes on, perhaps with a process that is new. `at_start`: the job begins."""
        self._begins, self._at_start = self._wanted, at_start

    def shares(self) -> Shares | None:
        """What is reduced in this step. None: each rank has its own gradients alone."""
        assignment = self._assignment()
        if not assignment.adopted:
            return None
        group = assignment.group(self._slot)
        rows = [
            [Row(assignment.slots[slot].dp_rank), *map(Row, assignment.adopted_by(slot))] for slot in group
        ]
        return Shares(rows, group.index(self._slot), list(map(Whole, self._gradients)))

    def before(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> None:
        """Computes what this rank has adopted in this step. `drop` takes a step back."""
        self._gradients = []
        self._answers.reduced = False
        if not self._wanted or self._channel.replaying:
            return
        self._tell_apart(step)
        if self._begins:
            self._agree_on_shapes()
            if self._try_due():
                self._try_out(train_step, step, drop)
            self._begins = False
        for origin in self._assignment().adopted_by(self._slot):
            with self._pipeline.on_route(origin):
                self._gradients.append(self._computed(origin, train_step, step, drop))
            events.emit("adopted_step", rank=self._slot, step=step, origin=origin)

    def after(self) -> None:
        """(the step is done) Raises UsageError for one that nobody could have carried out for another rank."""
        if self._wanted and self._state.updates.stepped > 1:
            raise self._config.not_shared(
                "and a train_step that updates twice: only what comes before the first update is computed for a lost "
                "rank",
                f"make two steps of it, or use {self._for_others()}",
            )

    def communicated(self, step: int, *, of_pipeline: bool) -> None:
        """The trainer communicates over several ranks in its step. `of_pipeline`: those of stages."""
        if of_pipeline:
            self._answers.trainers(step)
            return
        if self.under_way:
            raise self._config.not_shared(
                "and a train_step that communicates before its gradients are reduced: for a lost rank it is carried "
                "out by one rank alone",
                f"do it behind optimizer.step(), or use {self._for_others()}",
            )
        if self._wanted and self._assignment().adopted:
            self._answers.name(step, "a collective of train_step lacked the part of a rank that was lost")

    def scheduled(self) -> None:
        """A schedule is called. Raises UsageError behind the reduction: nobody would be there for a lost rank."""
        if self._wanted and self._answers.reduced and self._assignment().stage_groups > 1:
            raise self._config.not_shared(
                "and a schedule that is called behind the update: for a lost rank only what comes before it is "
                "computed",
                "" if self._config.reroutes else "evaluate at the beginning of the next step",
            )

    # --- ---

    def _tell_apart(self, step: int) -> None:
        """Attributes of modules of which each replica has its own (`swift.runtime.audit`): nobody has a lost rank's."""
        names = [name for name in self._state.apart if name not in self._told_apart]
        if names and self._assignment().adopted:
            self._told_apart.update(names)
            self._differences.say(
                step,
                f"{', '.join(names)}: each replica has a value of its own, and nobody has that of a lost rank; make it "
                f"the same on all, or, if it need not last: session.transient('{names[0].rpartition('.')[2]}')",
            )

    @property
    def repeats(self) -> bool:
        """In this step trainers' code may run more than once, for ranks that are lost."""
        return self._wanted and bool(self._assignment().adopted)

    def _before_reduction(self) -> None:
        if self.under_way:
            raise Computed
        self._answers.reduced = True

    def _computed(
        self, origin: int, train_step: Callable[[int], object], step: int, drop: Callable[[], None]
    ) -> Gradients:
        """Parameter -> its gradient, for this origin's batch; of those that have one."""

        return self._carried_out(origin, train_step, step, drop, self._gradients_now)

    def _gradients_now(self) -> Gradients:
        parameters = chain.from_iterable(stage.submod.parameters() for stage in self._state.stages)
        given = {p: p.grad.detach() for p in parameters if p.grad is not None and p.requires_grad}
        check_dense(given.values())
        return {parameter: gradient.clone() for parameter, gradient in given.items()}

    def _carried_out(
        self,
        origin: int,
        train_step: Callable[[int], object],
        step: int,
        drop: Callable[[], None],
        result: Callable[[], Result],
    ) -> Result:
        """`result` of the trainer's step for this origin, which is taken back after that."""
        own, quiet, self._witness.quiet = self._channel.origin, self._witness.quiet, True
        self._channel.rehearsing = self.under_way = True
        try:
            with self._channel.as_origin(origin):
                self._answers.early = self.reroute is not None
                self._channel.begin_step(step)
                self._state.begin_step()
                self.loaders.begin(origin)
                if origin != own:
                    self._state.draw_as_other(self.loaders.names)
                try:
                    train_step(step)
                except Computed:
                    pass
                given = result()
        finally:
            self._witness.quiet = quiet
            self._channel.rehearsing = self.under_way = self._answers.early = False
        drop()
        return given

    def _agree_on_shapes(self) -> None:
        """(all ranks, at the begin of a generation) While ranks are missing all pipelines learn shapes together. If one
        rank does not know those of a schedule, all learn them again: a loss may have cut short the call in which they
        were due, or a process is new."""
        schedules = self._state.schedules
        self._channel.shapes.together = bool(self._assignment().vacant)
        if not (self._channel.shapes.together and schedules):
            return
        unknown = torch.tensor([not _torch.knows_shapes(each) for each in schedules], dtype=torch.uint8)
        for schedule, told in zip(schedules, zip(*self._world.gathered(unknown), strict=True), strict=True):
            if any(map(bool, told)):
                _torch.forget_shapes(schedule)

    def _try_due(self) -> bool:
        """Some rank has not tried it out yet."""
        untried = torch.tensor([not self._tried], dtype=torch.uint8)
        self._world.run(lambda collectives: collectives.barrier(untried))
        return bool(untried)

    def _try_out(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> None:
        """Whether others can compute this rank's gradients, before anybody has to."""
        assignment = self._assignment()
        own, origins, next_to = self._channel.origin, assignment.whole_origins(), self._next_to()
        if len(origins) == 1 and own in origins:
            if not self._tried:
                self._differences.say(
                    step, "nobody was left to try out whether one rank can compute another's batches"
                )
            self._tried = True
        takes_part = len(origins) > 1 and own in origins
        told = (
            b"".join(
                self._digest(self._computed(origin, train_step, step, drop)) for origin in (own, next_to[own])
            )
            if takes_part
            else bytes(2 * _DIGEST_BYTES)
        )
        ranks = [assignment.slots[slot].dp_rank for slot in assignment.group(self._slot)]
        gathered = dict(
            zip(ranks, self._data.gathered(torch.frombuffer(bytearray(told), dtype=torch.uint8)), strict=True)
        )
        for rank, other in next_to.items():
            if not torch.equal(gathered[rank][_DIGEST_BYTES:], gathered[other][:_DIGEST_BYTES]):
                self._refuse(
                    step,
                    f"was tried out: data-parallel rank {rank} has computed other gradients for the batch of rank "
                    f"{other} than rank {other} itself",
                    "ask session.dp_rank inside of train_step, make loaders with session.loader(lambda dp_rank: ...), "
                    f"or use {self._for_others()}",
                )
        self._tried = self._tried or takes_part

    def _next_to(self) -> dict[int, int]:
        """Whose gradients the ranks of each whole pipeline compute in the trial."""
        origins = self._assignment().whole_origins()
        return dict(zip(origins, [*origins[1:], *origins[:1]], strict=True))

    def _for_others(self) -> str:
        """What a trainer can use that others cannot carry out for a lost rank."""
        alone = self._assignment().stage_groups == 1 and not self._config.reroutes
        return "lost_shard='drop'" if alone else "strategy='auto' without a lost_shard, and spares"

    def _refuse(self, step: int, problem: str, instead: str = "") -> None:
        """(all ranks, with the same words) Raises UsageError before the first step; later the job is named inexact."""
        error = self._config.not_shared(problem, instead)
        if self._at_start:
            raise error
        if self._slot == self._assignment().occupied[0]:
            self._differences.say(step, str(error))

    def _digest(self, gradients: Gradients) -> bytes:
        state = xxhash.xxh3_128()
        for stage in self._state.stages:
            for parameter in stage.submod.parameters():
                gradient = gradients.get(parameter)
                state.update(b"-" if gradient is None else byte_view(plain(gradient).contiguous()).data)
        return state.digest()
