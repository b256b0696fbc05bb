"""Rerouting: the microbatches of vacant slots are computed by the peers of their stages, among their own.

An *origin* is the data-parallel rank of a batch. Before its own step a rank runs the trainer's step once for each
other origin of which it computes microbatches, up to the call of the schedule, to get that call's external inputs. It
takes that step back. In its own step the schedule's call is a `ReroutedCall`: the ranks of all pipelines compute all
microbatches together. Gradients of other origins are kept separate, and are added in the order of origins and
microbatches (`swift_ft.train.reducer`): the bits are those of a full world.

A trial in a full world checks that a trainer's step can be run for another origin, as for `Adoption`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from swift_ft import events, torch_private
from swift_ft.comm.backend import Collectives
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.planner import Assignment
from swift_ft.state.digests import digest_of
from swift_ft.state.digests import digests as tensor_digests
from swift_ft.state.transfer import local
from swift_ft.train import rerouted_call
from swift_ft.train.batch_redistribution import Adoption, Computed, OwnGradients
from swift_ft.train.participants import Step
from swift_ft.train.reducer import Contribution, Row, Shares, parts_of, summed_by_origin
from swift_ft.train.rerouted_call import (
    MESSAGES_MAX,
    Inputs,
    ReroutedCall,
    Routes,
    Seconds,
    equal_seconds,
    plan,
    seconds_of,
    work_of,
)
from swift_ft.train.shared_replay import StepAction, unordered

# Checks, before any call, that a schedule's calls can be carried out in a degraded world.


def problem_of(schedule: Any, dp_size: int, *, exact_gradients: bool) -> str:
    """Returns why calls of this schedule cannot be rerouted; empty if they can. `dp_size`: of the full world."""
    actions = torch_private.schedule_actions(schedule)
    if actions is None:
        return "nobody knows what it computes in which order"
    held = list(torch_private.schedule_stages(schedule))
    order, count = [StepAction(*each) for each in actions], torch_private.schedule_microbatches(schedule)
    if problem := unordered(order, [stage.stage_index for stage in held], count):
        return problem
    parameters = [parameter for stage in held for parameter in set(stage.submod.parameters())]
    if len(set(parameters)) < len(parameters):
        return "two stages of a rank share a parameter, whose gradients cannot be kept apart by microbatch"
    if exact_gradients and any(parameter.is_complex() for parameter in parameters):
        # torch adds 1 * b to a, so no complex number can be added without changing bits of the other addend.
        return "a parameter is complex: sums of complex gradients in parts have other zeros"
    messages = held[0].num_stages * dp_size * count
    return "" if messages <= MESSAGES_MAX else f"{messages} messages of a step cannot be told apart"


def hooked_parameter(stages: Sequence[Any]) -> str:
    """Returns the name of a parameter with a hook on accumulated gradients; empty if there is none. Rerouting cannot
    call such a hook correctly: a lost rank's peers accumulate the gradients of their microbatches separately."""
    named = (pair for stage in stages for pair in stage.submod.named_parameters())
    return next((name for name, parameter in named if torch_private.has_sum_hooks(parameter)), "")


# Trial of a degraded step in a full world: its results are compared with those of the full world.
#
# One slot of each stage group counts as vacant. The peers of its stage compute its microbatches among their own, and
# its rank is idle. Their parts of its gradients are summed as in a degraded world, and must equal those that it has
# computed itself. Their own gradients must equal those of a step without rerouting.
#
# So a trainer is refused in its first step if a part of a batch reaches a module or the loss in another way than as an
# argument of `schedule.step` (an attribute, a closure), or if a forward depends on earlier ones.


class Left(NamedTuple):
    """Results that a call of a schedule leaves at one rank."""

    gradients: OwnGradients
    """Copies of the gradients."""
    digests: Mapping[str, bytes]
    """Description -> digest of every other result: buffers, losses, outputs, states of registered objects."""


def left_by(
    schedule: Any, call: Mapping[str, Any], stages: Sequence[Any], objects: Mapping[str, Any]
) -> Left:
    """Collects the results of a call. `call`: its arguments, by name. `stages`: of this rank. `objects`: the trainer's
    registered objects, by name."""
    parameters = chain.from_iterable(stage.submod.parameters() for stage in stages)
    gradients = {p: p.grad.detach().clone() for p in parameters if p.grad is not None and p.requires_grad}
    digests = {
        f"buffer {name!r} of stage {stage.stage_index}": _bits(buffer)
        for stage in stages
        for name, buffer in stage.submod.named_buffers()
    }
    digests |= {
        f"the loss of microbatch {mb}": _bits(loss) for mb, loss in enumerate(call.get("losses") or ())
    }
    for stage in torch_private.schedule_stages(schedule):
        if stage.is_last:
            outputs = enumerate(stage.output_chunks)
            digests |= {f"the output of microbatch {mb}": _bits(output) for mb, output in outputs}
    for name, value in objects.items():
        digests[f"the state of register({name}=...)"] = digest_of(value.state_dict())
    return Left(gradients, digests)


def with_vacancies(assignment: Assignment) -> Assignment:
    """Returns the assignment with one vacant cell in each stage group, of different origins in neighbouring groups.
    Raises ValueError if `assignment` is not a full world."""
    heads = (
        assignment.at(group, group % assignment.replicas * assignment.shards)
        for group in range(assignment.stage_groups)
    )
    vacant = {slot for head in heads for slot in assignment.cell(head)}
    return assignment.held_by(
        {slot: member for slot, member in assignment.members.items() if slot not in vacant}
    ).rerouted()


def trial_difference(stages: Sequence[Any], one: Left, other: Left) -> str:
    """Returns a description of the first result that differs in any bit; empty if all are equal."""
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            if _differ(one.gradients.get(parameter), other.gradients.get(parameter)):
                return f"the gradient of {name!r} of stage {stage.stage_index}"
    names = [*one.digests, *(name for name in other.digests if name not in one.digests)]
    return next((name for name in names if one.digests.get(name) != other.digests.get(name)), "")


def summed(
    group: ReconfigurableGroup,
    stages: Sequence[Any],
    rows: Sequence[Sequence[Row]],
    mine: Sequence[Contribution],
    scale: int,
) -> OwnGradients:
    """(all ranks of a stage group) Returns the summed gradients of the one origin to which all rows belong. `rows`: of
    each rank, by its place; `mine`: this rank's, by row. `scale`: divisor of a sum over microbatches."""
    given: OwnGradients = {}
    parameters = dict.fromkeys(p for stage in stages for p in stage.submod.parameters() if p.requires_grad)
    for parameter in parameters:
        bucket = [parameter]
        flat = [torch.cat(parts_of(bucket, contribution)) for contribution in mine]
        like = local(parameter)
        sent = torch.stack(flat) if flat else like.new_empty(0, like.numel() + 1)
        total: list[torch.Tensor] = []

        def run(
            collectives: Collectives, sent: torch.Tensor = sent, total: list[torch.Tensor] = total
        ) -> None:
            total.append(summed_by_origin(collectives, sent, rows, scale))

        group.run(run)
        gradient, used = torch.split(total[0], [like.numel(), 1])
        if float(used):
            given[parameter] = gradient.view_as(like)
    return given


def _differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is not other
    return _bits(one) != _bits(other)


def _bits(value: Any) -> bytes:
    leaves = [
        local(leaf) for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)
    ]
    forms = [f"{leaf.dtype}{tuple(leaf.shape)}".encode() for leaf in leaves]
    return b"".join([*forms, *tensor_digests(leaves)])


_WHOLE, _SPLIT = 1, 2
_NO_CALL = "and a train_step that does not call the schedule"
_ONE_CALL = (
    "and a train_step that calls the schedule more than once: while a rank is missing only one call, which trains, can "
    "be shared"
)


class Rerouting(Adoption):
    """The `Adoption` of one rank in a job with pipelines. Used on the trainer's thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._capturing = False
        self._captured: Inputs | None = None
        self._inputs: dict[int, Inputs] = {}
        """Other origin -> external inputs of this rank's stages in the step under way."""
        self._call: ReroutedCall | None = None
        """Rerouted call of the step under way."""
        self._calls = 0
        """Training calls of schedules in the step under way."""
        self._splits: bool | None = None
        """Split backwards give the same bits as the schedule at all ranks. None: unknown in this process."""
        self._trying = False
        """The call under way is the trial of split backwards."""
        self._seconds: Seconds | None = None
        """Stage times that all ranks agreed on at the beginning of this generation."""
        self._routes: dict[tuple[int, tuple[int, ...], bool], Routes] = {}
        """Of this generation: schedule, ranks that are present, whether backwards are split -> routes."""
        self._parts = self._site.config.shards * self._site.config.tensor_parallel
        """Ranks of a cell. Calls are planned in cells (`Assignment.in_cells`), whose ranks all do the same."""
        self._cell, self._shard = divmod(self._slot, self._parts)
        self._stops = False
        """The step under way ends after its training call of the schedule, and is taken back."""
        self._evaluates = False
        """In such a step, the schedule was called for evaluation before its training call."""
        self._schedule: Any = None
        """Schedule of the latest training call. A trainer may have several schedules."""
        self._looks_again = False
        """Check parameters for hooks again after the first step, which may register some."""
        self._left: Left | None = None
        """Results of the call in such a step."""
        self._pretended: Assignment | None = None
        """(trial) Assignment with vacant slots that is used instead of the real one."""
        self._made: list[tuple[int, int]] | None = None
        """(id, version) of each gradient after the schedule's call, to detect changes. None: no check is needed."""

    def resume(self, *, at_start: bool) -> None:
        super().resume(at_start=at_start)
        self._looks_again = at_start

    def check(self) -> None:
        """Extends `Adoption.check`. Raises UsageError for a schedule whose calls cannot be rerouted."""
        if not self._site.state.schedules:
            raise self._site.config.not_shared("without a pipeline schedule: microbatches are shared")
        for schedule in self._site.state.schedules:
            replicas = self._site.config.replicas
            if problem := problem_of(schedule, replicas, exact_gradients=self._site.config.exact_gradients):
                raise self._site.config.not_shared(f"with {type(schedule).__name__}: {problem}")
        super().check()

    def shares(self) -> Shares | None:
        assignment = self._assignment()
        if not assignment.adopted:
            return None
        if self._call is None:
            raise self._site.config.not_shared(
                "and gradients that no call of the schedule has made: it is called once in each step"
            )
        if not self._site.config.exact_gradients:
            return None
        cells = [slot // self._parts for slot in assignment.data(self._slot)]
        replicas = [self._replica(assignment, cell) for cell in cells]
        return self._call.shares(cells, replicas)

    def before_step(self, step: Step) -> None:
        self._call, self._inputs, self._calls, self._made = None, {}, 0, None
        super().before_step(step)

    def _compute_adopted(self, step: Step) -> None:
        if self._begins:
            self._begin(step)
        self._inputs = self._inputs_of(self._assignment(), step)

    def _inputs_of(self, assignment: Assignment, step: Step) -> dict[int, Inputs]:
        group, inputs = assignment.slots[self._slot].stage_group, dict[int, Inputs]()
        self._capturing = True
        try:
            for origin in assignment.adopted_by(self._slot):
                taken = self._carried_out(origin, step, self._captured_inputs)
                # Gradients from before the call count as a part of the first microbatch's.
                begins = assignment.owner(group, origin, 0) == self._slot
                inputs[origin // self._parts] = taken if begins else taken._replace(gradients={})
            return inputs
        finally:
            self._capturing = False

    def before_reduction(self) -> None:
        made, self._made = self._made, None
        if made is not None and made != self._versions():
            raise self._site.config.not_shared(
                "and a train_step that changes gradients between schedule.step and their reduction: those that others "
                "compute for a lost rank would stay as they are",
                "call session.reduce_gradients() first",
            )
        super().before_reduction()

    def _versions(self) -> list[tuple[int, int]]:
        parameters = chain.from_iterable(stage.submod.parameters() for stage in self._site.state.stages)
        return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]

    def end_step(self, step: Step) -> None:
        super().end_step(step)
        if self._calls > 1:
            raise self._site.config.not_shared(_ONE_CALL)
        if self._looks_again:
            self._looks_again = False
            self._check_hooks(step.number)

    def _begin(self, step: Step) -> None:
        """(first step of a generation) Runs trials if due. In a degraded world, agrees on stage times."""
        self._begins, self._seconds = False, None
        self._routes.clear()
        self._agree_on_shapes()
        self._check_hooks(step.number)
        if not self._assignment().adopted:
            if self._try_due():
                self._try_all(step)
            return
        # A process that joins a degraded world cannot run the trial. Its peers, with the same stages, have run it.
        own = torch.tensor([self._tried], dtype=torch.uint8)
        if not any(map(bool, self._data.gathered(own))):
            self._say_untried(step)
        # A process that has joined since the trial does not know its result.
        (whole, split) = (_WHOLE, _SPLIT) if self._splits is not None else (0, 0)
        known = torch.tensor([split if self._splits else whole], dtype=torch.uint8)
        self._splits = max(int(each) for each in self._site.world.gathered(known)) == _SPLIT
        self._seconds = self._told_seconds()
        events.emit(
            "planned_by",
            rank=self._slot,
            step=step.number,
            splits=self._splits,
            seconds=self._seconds,
        )

    def _try_all(self, step: Step) -> None:
        """(all ranks of a full world) Runs all trials. If a loss interrupts them, `_tried` keeps its value."""
        tried, self._tried = self._tried, False
        passed = tried
        try:
            self._try_out(step)
            in_torchs_way = self._left_by_call(step)
            self._try_to_split(in_torchs_way, step)
            self._try_vacancies(in_torchs_way, step)
            passed = True
        finally:
            self._tried = passed

    def _check_hooks(self, step: int) -> None:
        """Refuses hooks on accumulated gradients. A trial would miss a hook that acts only on later steps' sums."""
        name = hooked_parameter(self._site.state.stages if self._site.config.exact_gradients else ())
        if not name:
            return
        error = self._site.config.not_shared(
            "and a hook that is called when a gradient has been added up "
            f"(register_post_accumulate_grad_hook of {name!r}): a lost rank's peers add those of their microbatches "
            "apart from each other",
            "do that behind schedule.step and session.reduce_gradients(), or use register_hook, which is called with "
            "each microbatch's gradient",
        )
        if self._at_start:
            raise error
        self._site.member.say_differs(step, str(error))

    def _stage_count(self) -> int:
        """Returns the schedule's number of stages. (This process's assignment counts each stage group as one.)"""
        (schedule, *_) = self._site.state.schedules
        return int(torch_private.schedule_stages(schedule)[0].num_stages)

    def _told_seconds(self) -> Seconds:
        """(all ranks) Returns the stage times from the measurements of all ranks. Equal at all ranks, which plan by
        them."""
        own = torch.full((self._stage_count(), 2), math.nan, dtype=torch.float64)
        for stage, taken in self._site.channel.profile.stage_seconds().items():
            own[stage] = torch.tensor(taken, dtype=torch.float64)
        return seconds_of(self._site.world.gathered(own))

    def _try_to_split(self, in_torchs_way: Left, step: Step) -> None:
        """Checks that split backwards give each rank the same bits as the schedule; degraded steps then use them.

        They usually do. Exceptions are parameters that are used in a sum or twice (`x @ (a + b)`), for which torch 2.13
        computes wrong gradients in a split backward, and stages with hooks that a split backward does not call.
        """
        equal, must = False, next(filter(torch_private.splits_backward, self._site.state.schedules), None)
        if self._site.config.split_backward or must is not None:
            self._trying = True
            try:
                left = self._left_by_call(step)
            finally:
                self._trying, self._call = False, None
            equal = not trial_difference(self._site.state.stages, in_torchs_way, left)
        told = torch.tensor([equal], dtype=torch.uint8)
        self._splits = all(bool(each) for each in self._site.world.gathered(told))
        if must is not None and not self._splits:
            raise self._site.config.not_shared(
                f"with {type(must).__name__}: where each microbatch's gradients are computed by themselves, they "
                "have other bits"
            )
        events.emit("splits_backward", rank=self._slot, own=equal, all=self._splits)

    def _try_vacancies(self, in_torchs_way: Left, step: Step) -> None:
        """Checks that a degraded step would have the same bits. Refuses the trainer if not."""
        assignment, stages = self._assignment(), self._site.state.stages
        if assignment.vacant:
            return  # vacant but not adopted: other ranks never compute a lost rank's batch
        if not self._site.config.exact_gradients:
            return  # other bits are allowed, and memory may not suffice to keep gradients separate
        # Ranks whose slots count as vacant do not call the schedule, so all ranks must decide alike.
        evaluates = self._site.world.gathered(torch.tensor([self._evaluates], dtype=torch.uint8))
        if any(bool(each) for each in evaluates):
            if self._at_start:
                raise self._site.config.not_shared(_ONE_CALL)
            return  # a recovery has led to such a step, and the world is full
        pretended = with_vacancies(assignment)
        routes, here = self._routes_of(pretended, self._schedule), self._slot in pretended.members
        group = assignment.data(self._slot)
        rows = [
            routes.share_of(cell, self._replica(assignment, cell)) if slot in pretended.members else []
            for slot, cell in ((slot, slot // self._parts) for slot in group)
        ]
        left, mine, held = in_torchs_way, list[Contribution](), 0
        if here:
            mine_of = rows[group.index(self._slot)]
            left, mine, held = self._left_in(pretended, mine_of, step)
        theirs = summed(self._data, stages, rows, mine, torch_private.schedule_grad_scale(self._schedule))
        if not here:
            left = in_torchs_way._replace(gradients=theirs)
        told = self._site.world.gathered_texts(trial_difference(stages, in_torchs_way, left)[:200])
        events.emit(
            "vacancies_tried",
            rank=self._slot,
            step=step.number,
            vacant=list(pretended.vacant),
            gradient_bytes=held,
        )
        slot, what = next((pair for pair in zip(assignment.occupied, told, strict=True) if pair[1]), (0, ""))
        if what:
            lost = " and ".join(map(str, pretended.vacant)) if len(pretended.vacant) < 3 else "of all stages"
            self._refuse(
                step.number,
                f"was tried out as if ranks {lost} were lost, and {what} for the batch of rank {slot} has other bits: "
                "what belongs to a batch must reach stages and loss as an argument of schedule.step, and a forward "
                "must not depend on earlier ones",
            )

    def _left_in(
        self, pretended: Assignment, rows: Sequence[Row], step: Step
    ) -> tuple[Left, list[Contribution], int]:
        """Runs a call in the pretended world. Returns its results, this rank's contribution to each of `rows`, and the
        maximum bytes of other origins' gradients that it held."""
        self._inputs = self._inputs_of(pretended, step)
        self._pretended = pretended
        try:
            left = self._left_by_call(step)
        finally:
            self._pretended, self._inputs = None, {}
        call, self._call = self._call, None
        assert call is not None
        return left, call.contributions(rows), call.bytes_max

    def _left_by_call(self, step: Step) -> Left:
        """Runs a step of this rank's own batch up to the end of the schedule's call, takes it back, and returns the
        results of the call."""
        self._stops, self._evaluates = True, False
        try:
            return self._carried_out(self._site.channel.origin, step, self._what_is_left)
        finally:
            self._stops = False

    def _what_is_left(self) -> Left:
        left, self._left = self._left, None
        if left is None:
            raise self._site.config.not_shared(_NO_CALL)
        return left

    def _captured_inputs(self) -> Inputs:
        taken, self._captured = self._captured, None
        if taken is None:
            raise self._site.config.not_shared(_NO_CALL)
        return taken

    def reroute(self, schedule: Any, inner: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """(the schedule is called) Carries the call out. Raises Computed to end a step that is only run up to or
        through this call, UsageError for a call that other ranks cannot carry out."""
        self._answers.early = False
        entering = [value for name, value in arguments.items() if name != "losses"]
        tensors = (leaf for leaf in pytree.tree_leaves(entering) if isinstance(leaf, torch.Tensor))
        if any(tensor.requires_grad for tensor in tensors):
            raise self._site.config.not_shared(
                "and an input of the schedule that requires a gradient: nobody would compute it for another rank",
                "detach it, or compute it inside of the stage",
            )
        if self._capturing:
            rerouted_call.split_inputs(schedule, arguments)
            self._captured = pytree.tree_map_only(
                torch.Tensor,
                lambda tensor: tensor.detach().clone(),
                Inputs(
                    arguments["arg_mbs"],
                    arguments["kwarg_mbs"],
                    arguments.get("target_mbs"),
                    arguments.get("loss_kwargs"),
                ),
            )._replace(gradients=self._gradients_now())
            raise Computed
        trains = all(stage.has_backward for stage in torch_private.schedule_stages(schedule))
        self._schedule = schedule if trains else self._schedule
        self._calls += trains and not (self.under_way or self._site.channel.rehearsing)
        self._evaluates = self._evaluates or (self._stops and not trains)
        given = self._called(schedule, inner, arguments, trains=trains)
        if self._stops and trains:
            self._left = left_by(schedule, arguments, self._site.state.stages, self._site.state.objects)
            raise Computed
        return given

    def _called(
        self, schedule: Any, inner: Callable[[], Any], arguments: dict[str, Any], *, trains: bool
    ) -> Any:
        assignment = self._pretended or self._assignment()
        if not assignment.adopted and not (self._trying and trains):
            return self._in_torchs_way(schedule, inner)
        if self._calls > 1 or not trains:
            raise self._site.config.not_shared(_ONE_CALL)
        channel = self._site.channel
        self._call = ReroutedCall(self._site, self._routes_of(assignment, schedule), self._quietly)
        if not (self._site.config.exact_gradients or self._trying):
            self._answers.name(
                channel.step, "gradients of a lost rank's microbatches were added to other ranks' own"
            )
        rehearsing, channel.rehearsing = channel.rehearsing, True  # never replayed, so not logged
        try:
            self._call.run(schedule, arguments, self._inputs)
        finally:
            channel.rehearsing = rehearsing
        for replica in self._inputs if self._pretended is None else ():
            mine = self._call.computed(replica)
            events.emit(
                "adopted_step",
                rank=self._slot,
                step=channel.step,
                origin=replica * self._parts + self._shard,
                microbatches=mine,
                gradient_bytes=self._call.bytes_max,
            )
        self._inputs = {}
        return None

    def _replica(self, assignment: Assignment, cell: int) -> int:
        return assignment.slots[cell * self._parts].dp_rank // self._parts

    def _routes_of(self, assignment: Assignment, schedule: Any) -> Routes:
        """Returns who computes what when, which all ranks plan alike."""
        split, config = self._trying or bool(self._splits), self._site.config
        key = id(schedule), assignment.occupied, split
        if key not in self._routes:
            seconds = self._seconds or equal_seconds(self._stage_count())
            memory = config.adaptive_memory
            work = work_of(assignment.in_cells(), schedule, seconds, split=split, memory=memory)
            self._routes[key] = plan(work, staggered=config.staggered)
        return self._routes[key]

    def _in_torchs_way(self, schedule: Any, inner: Callable[[], Any]) -> Any:
        given = inner()
        if any(rerouted_call.skips_stages(stage) for stage in torch_private.schedule_stages(schedule)):
            raise self._site.config.not_shared(
                "and a stage that passes tensors by a stage: they go from one stage to the next"
            )
        self._made = self._versions()
        return given

    @contextmanager
    def _quietly(self) -> Any:
        witness = self._site.witness
        quiet, witness.quiet = witness.quiet, True
        try:
            yield
        finally:
            witness.quiet = quiet
