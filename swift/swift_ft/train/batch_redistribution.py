"""Batch redistribution: the remaining ranks compute the batches of data-parallel ranks whose slots are vacant.

An *origin* is the data-parallel rank that a batch belongs to. Before its own step, a rank runs the trainer's step once
for each origin that it has adopted, up to the first reduction of gradients. It rolls that step back, as after a
failure, and keeps the gradients. The reduction of its own step sums all gradients in the order of origins
(`swift_ft.train.reducer`). So the mean is bitwise equal to that of a full world.

In a pipeline, all ranks of an origin's route run this step together: the remaining ranks of that data-parallel rank, in
their own step, and ranks of a complete pipeline in place of the missing ones (`Assignment.redistributed`). There is no
deadlock: a rank that adopts belongs to a complete pipeline, and runs its own step last.

Requirement: the step gets everything specific to one data-parallel rank from `session.dp_rank` and from loaders created
by `session.loader`. This is verified before the first step, and in each generation with a new process: each rank
computes its own gradients and those of the next data-parallel rank, and all ranks compare digests. Memory: one copy of
the gradients per adopted origin.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import TypeVar

import torch
import xxhash

from swift_ft import events, torch_private
from swift_ft.comm.backend import Collectives
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.planner import Assignment
from swift_ft.state.digests import DIGEST_BYTES, digests
from swift_ft.state.loaders import OriginLoader
from swift_ft.state.transfer import local
from swift_ft.train.participants import Participant, Site, Step
from swift_ft.train.reducer import Row, Shares, Whole, check_dense

# Collectives over a pipeline with missing ranks, after the reduction of gradients.
#
# Until its gradients are reduced, a step runs for each origin on all ranks of its route (`swift_ft.comm.groups`), so a
# collective over the pipeline is complete. After the reduction, each rank runs its own step only, and the places of the
# missing ranks are empty. So a rank of an incomplete pipeline takes the result of a complete pipeline, from the rank
# that runs the same stage there. Results computed from averaged gradients and weights (a norm, tied weights) are
# bitwise equal. Any other result (a loss) is that of the other pipeline.


class Answers:
    """Results of one rank's pipeline collectives when pipelines lack ranks. Used by the trainer's thread."""

    def __init__(self, site: Site, assignment: Callable[[], Assignment], data: ReconfigurableGroup) -> None:
        """`assignment` returns this generation's. `data`: the ranks of this stage. If the job reroutes, microbatches do
        not follow pipelines (`swift_ft.train.rerouting`), so the first rank of each stage supplies results throughout
        the step."""
        self._site = site
        self._assignment = assignment
        self._data = data
        self._named = False
        self.early = False
        """(rerouting) Set while a step runs for another origin and has not called its schedule yet."""
        self.reduced = False
        """(adoption) Set once the reduction of the current step's gradients has begun."""

    @property
    def asked(self) -> bool:
        """Returns whether some pipelines lack ranks whose places are empty at this point of the step."""
        assignment = self._assignment()
        return (
            (self.reduced or self._site.config.reroutes)
            and bool(assignment.adopted)
            and assignment.stage_groups > 1
        )

    def into(self, results: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        """Writes the collective's result into `results` on the ranks of all pipelines; `run` does so on complete ones.
        Raises UsageError before the schedule of another origin's step (`early`)."""
        if self.early:
            raise self._site.config.not_shared(
                "and a train_step that communicates over its pipeline before it calls the schedule: for a lost rank "
                "not all of its pipeline take part",
                "do it behind the call",
            )
        if not self.asked:
            run()
            return
        assignment = self._assignment()
        group = assignment.data(self._site.rank)
        if self._site.config.reroutes:
            have = {group[0]}
        else:
            whole = assignment.whole_origins()
            have = {slot for slot in group if assignment.slots[slot].dp_rank in whole}
        gives = group.index(min(have))
        if self._site.rank in have:
            run()
        # A rank that has run the collective keeps its own result, since other pipelines' results may differ.
        passed = [result.detach().clone() for result in results]

        def pass_on(collectives: Collectives) -> None:
            for tensor in passed:
                collectives.broadcast(tensor, gives)

        self._data.run(pass_on)
        if self._site.rank not in have:
            for result, tensor in zip(results, passed, strict=True):
                result.detach().copy_(tensor)

    def trainers(self, step: int) -> None:
        """Reports a collective that the trainer calls itself, since its result may depend on the batch."""
        if self.asked:
            self.name(
                step, "the result of a collective of train_step behind the update was another pipeline's"
            )

    def name(self, step: int, words: str) -> None:
        """Reports, once, that the job is not exact from this step on."""
        if not self._named:
            self._named = True
            self._site.member.say_differs(step, words)


# Gradients of several batches on one rank, each accumulated as its own rank would have done.
#
# autograd accumulates into ``parameter.grad`` in the order of the backwards. Here microbatches of several origins are
# interleaved and may be out of order, which changes the bits of a floating-point sum. So each origin has its own
# accumulator, and the gradients of an early microbatch are buffered until its turn.

OwnGradients = dict[torch.nn.Parameter, torch.Tensor]


class Accumulator:
    """Sum of some parameters' gradients over `microbatches`, added in this order.

    ``with accumulator.adding(microbatch): …backward…`` once per microbatch, in any order.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        microbatches: Sequence[int],
        *,
        own: bool,
        begun: Mapping[torch.nn.Parameter, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """`own`: the sum is in ``parameter.grad`` between two microbatches. Otherwise it is in ``gradients``, which
        start as `begun`."""
        self._parameters = list(parameters)
        self._turns = list(microbatches)
        self._own = own
        self._early: dict[int, OwnGradients] = {}
        self.gradients: OwnGradients = {p: begun[p] for p in self._parameters if p in begun}

    @contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        """Directs the weight gradients computed inside to this microbatch's place in the sum."""
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
    def _instead(self, into: OwnGradients) -> Iterator[None]:
        """Replaces every ``parameter.grad`` by that of `into`, so that autograd accumulates there."""
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
        """Adds the buffered gradients of microbatches that are due now, as autograd would."""
        while self._turns and self._turns[0] in self._early:
            early = self._early.pop(self._turns.pop(0))
            if self._own:
                _add({p: p.grad for p in early if p.grad is not None}, early, own=True)
            else:
                _add(self.gradients, early, own=False)


def _add(to: OwnGradients, early: Mapping[torch.nn.Parameter, torch.Tensor], *, own: bool) -> None:
    for parameter, gradient in early.items():
        if parameter in to:
            to[parameter].add_(gradient)
        elif own:
            parameter.grad = gradient
        else:
            to[parameter] = gradient


Gradients = Mapping[torch.nn.Parameter, torch.Tensor]
Result = TypeVar("Result")


class Computed(Exception):
    """Raised inside an origin's step once its result exists: its unreduced gradients, or its inputs."""


class Adoption(Participant):
    """One rank's part in batch redistribution. Used by the trainer's thread."""

    reroute: Callable[..., object] | None = None
    """Runs calls of a schedule in which ranks are missing (`swift_ft.train.rerouting`); None without rerouting."""

    def __init__(
        self,
        site: Site,
        assignment: Callable[[], Assignment],
        groups: Mapping[str, ReconfigurableGroup],
        loaders: Mapping[str, OriginLoader],
    ) -> None:
        """`assignment` returns this generation's. `groups`: the trainer's groups, by name. `loaders`: of
        `session.loader`, by the names under which their states are registered."""
        self._site = site
        self._data, self._pipeline = groups["data"], groups["pipeline"]
        self._answers = self._pipeline.answers = Answers(site, assignment, self._data)
        self._slot = site.rank
        self._loaders = loaders
        self._assignment = assignment
        self._begins = False
        """Set in a new generation until the ranks have agreed whether a trial is due."""
        self._tried = False
        self._at_start = True
        """Set until the job's first step, so that the job can still be refused."""
        self.under_way = False
        """Set while a step runs for one origin; it is rolled back afterwards."""
        self._gradients: list[Gradients] = []
        """Gradients of each adopted origin in this step, by ascending origin."""

    def check(self) -> None:
        updates = self._site.state.updates
        if len(updates.optimizers) > 1:
            raise self._site.config.not_shared(
                "with several optimizers: only what comes before the first reduction is computed for a lost rank",
                f"use one optimizer with several param_groups, or {self._for_others()}",
            )
        if any(journal.whole for journal in updates.journals):
            raise self._site.config.not_shared(
                "with an optimizer that computes gradients in its step (LBFGS)", f"use {self._for_others()}"
            )

    def resume(self, *, at_start: bool) -> None:
        self._begins, self._at_start = True, at_start

    def shares(self) -> Shares | None:
        """Returns which rank contributes which gradients to this step's reduction, or None if no batch is adopted."""
        assignment = self._assignment()
        if not assignment.adopted:
            return None
        group = assignment.data(self._slot)
        rows = [
            [Row(assignment.slots[slot].dp_rank), *map(Row, assignment.adopted_by(slot))] for slot in group
        ]
        return Shares(rows, group.index(self._slot), list(map(Whole, self._gradients)))

    def before_step(self, step: Step) -> None:
        self._gradients = []
        self._answers.reduced = False
        if not step.replaying:
            self._compute_adopted(step)

    def _compute_adopted(self, step: Step) -> None:
        if self._begins:
            self._agree_on_shapes()
            if self._try_due():
                self._try_out(step)
            self._begins = False
        for origin in self._assignment().adopted_by(self._slot):
            with self._pipeline.on_route(origin):
                self._gradients.append(self._computed(origin, step))
            events.emit("adopted_step", rank=self._slot, step=step.number, origin=origin)

    def end_step(self, step: Step) -> None:
        if self._site.state.updates.stepped > 1:
            raise self._site.config.not_shared(
                "and a train_step that updates twice: only what comes before the first update is computed for a lost "
                "rank",
                f"make two steps of it, or use {self._for_others()}",
            )

    def communicated(self, step: int, *, of_pipeline: bool) -> None:
        """Handles a collective that the trainer calls in its step. `of_pipeline`: it is over the ranks of a pipeline.
        Raises UsageError before the reduction of another origin's step."""
        if of_pipeline:
            self._answers.trainers(step)
            return
        if self.under_way:
            raise self._site.config.not_shared(
                "and a train_step that communicates before its gradients are reduced: for a lost rank it is carried "
                "out by one rank alone",
                f"do it behind optimizer.step(), or use {self._for_others()}",
            )
        if self._assignment().adopted:
            self._answers.name(step, "a collective of train_step lacked the part of a rank that was lost")

    def scheduled(self) -> None:
        """(a schedule is called) Raises UsageError after the reduction, where no rank stands in for a lost one."""
        if self._answers.reduced and self._assignment().stage_groups > 1:
            raise self._site.config.not_shared(
                "and a schedule that is called behind the update: for a lost rank only what comes before it is "
                "computed",
                "" if self._site.config.reroutes else "evaluate at the beginning of the next step",
            )

    # --- ---

    def before_reduction(self) -> None:
        if self.under_way:
            raise Computed
        self._answers.reduced = True

    def _computed(self, origin: int, step: Step) -> Gradients:
        return self._carried_out(origin, step, self._gradients_now)

    def _gradients_now(self) -> Gradients:
        parameters = chain.from_iterable(stage.submod.parameters() for stage in self._site.state.stages)
        given = {p: p.grad.detach() for p in parameters if p.grad is not None and p.requires_grad}
        check_dense(given.values())
        return {parameter: gradient.clone() for parameter, gradient in given.items()}

    def _carried_out(self, origin: int, step: Step, result: Callable[[], Result]) -> Result:
        """Runs the trainer's step for this origin up to `Computed`, takes `result()` and rolls the step back."""
        witness = self._site.witness
        own, quiet, witness.quiet = self._site.channel.origin, witness.quiet, True
        self._site.channel.rehearsing = self.under_way = True
        try:
            with self._site.channel.as_origin(origin):
                self._answers.early = self.reroute is not None
                self._site.channel.begin_step(step.number)
                self._site.state.begin_step()
                for loader in self._loaders.values():
                    loader.begin(origin // self._assignment().tensor)
                if origin != own:
                    self._site.state.draw_as_other(self._loaders.keys())
                try:
                    step.train(step.number)
                except Computed:
                    pass
                given = result()
        finally:
            witness.quiet = quiet
            self._site.channel.rehearsing = self.under_way = self._answers.early = False
        step.drop()
        return given

    def _agree_on_shapes(self) -> None:
        """(all ranks, at the start of a generation) While ranks are missing, all pipelines infer shapes together. If
        one rank lacks those of a schedule, all infer them again: it may be a new process, or a failure may have
        interrupted the call that infers them."""
        schedules = self._site.state.schedules
        self._site.channel.shapes.together = bool(self._assignment().vacant)
        if not (self._site.channel.shapes.together and schedules):
            return
        unknown = torch.tensor(
            [not torch_private.knows_shapes(each) for each in schedules], dtype=torch.uint8
        )
        for schedule, told in zip(
            schedules, zip(*self._site.world.gathered(unknown), strict=True), strict=True
        ):
            if any(map(bool, told)):
                torch_private.forget_shapes(schedule)

    def _try_due(self) -> bool:
        """Returns whether some rank has not taken part in a trial yet. All ranks call it."""
        untried = torch.tensor([not self._tried], dtype=torch.uint8)
        self._site.world.run(lambda collectives: collectives.barrier(untried))
        return bool(untried)

    def _try_out(self, step: Step) -> None:
        """Checks, before it is needed, that each rank computes the next data-parallel rank's gradients bitwise."""
        assignment = self._assignment()
        own, cell = self._site.channel.origin, assignment.shards
        origins = assignment.whole_origins()[own % cell :: cell]
        if len(origins) == 1 and own in origins:
            if not self._tried:
                self._say_untried(step)
            self._tried = True
        next_to = dict(zip(origins, [*origins[1:], *origins[:1]], strict=True))
        takes_part = len(origins) > 1 and own in origins
        told = (
            b"".join(self._digest(self._computed(origin, step)) for origin in (own, next_to[own]))
            if takes_part
            else bytes(2 * DIGEST_BYTES)
        )
        ranks = [assignment.slots[slot].dp_rank for slot in assignment.data(self._slot)]
        gathered = dict(
            zip(ranks, self._data.gathered(torch.frombuffer(bytearray(told), dtype=torch.uint8)), strict=True)
        )
        for rank, other in next_to.items():
            if not torch.equal(gathered[rank][DIGEST_BYTES:], gathered[other][:DIGEST_BYTES]):
                rank, other = (place // assignment.tensor for place in (rank, other))
                self._refuse(
                    step.number,
                    f"was tried out: data-parallel rank {rank} has computed other gradients for the batch of rank "
                    f"{other} than rank {other} itself",
                    "ask session.dp_rank inside of train_step, make loaders with session.loader(lambda dp_rank: ...), "
                    f"or use {self._for_others()}",
                )
        self._tried = self._tried or takes_part

    def _say_untried(self, step: Step) -> None:
        self._site.member.say_differs(
            step.number, "nobody was left to try out whether one rank can compute another's batches"
        )

    def _for_others(self) -> str:
        """Returns the settings to suggest for a trainer whose steps cannot be run for another rank."""
        alone = self._assignment().stage_groups == 1 and not self._site.config.reroutes
        return "lost_shard='drop'" if alone else "strategy='auto' without a lost_shard, and spares"

    def _refuse(self, step: int, problem: str, instead: str = "") -> None:
        """(all ranks, with equal arguments) Raises UsageError before the first step; later reports an inexact job."""
        error = self._site.config.not_shared(problem, instead)
        if self._at_start:
            raise error
        if self._slot == self._assignment().occupied[0]:
            self._site.member.say_differs(step, str(error))

    def _digest(self, gradients: Gradients) -> bytes:
        parameters = [p for stage in self._site.state.stages for p in stage.submod.parameters()]
        there = bytes(p in gradients for p in parameters)
        of_each = digests([local(gradients[p]) for p in parameters if p in gradients])
        return xxhash.xxh3_128_digest(there + b"".join(of_each))
