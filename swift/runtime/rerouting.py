"""Microbatches of data-parallel ranks whose slots are vacant, computed by the peers of their stages among their own.

Before its own step a rank carries the trainer's step out once for each origin that it computes some of, up to the call
of the schedule: then it knows what enters it from outside. It takes that step back. In its own step the schedule's call
is a `ReroutedCall`: the ranks of all pipelines compute all microbatches together. Gradients of other origins are kept
apart, and are added in the order of origins and microbatches (`swift.runtime.reducer`): the bits are those of a full
world.

Whether a trainer's step can be carried out for another origin is tried out as for `Adoption`, in a full world.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree as pytree

from swift import events
from swift.recovery import Assignment
from swift.runtime import _torch, _torch_calls
from swift.runtime.adoption import Adoption, Computed
from swift.runtime.draws import Drawn
from swift.runtime.fetched_batches import FetchedBatches, Wanted, adopters, neighbours
from swift.runtime.plans_ahead import PlansAhead
from swift.runtime.reducer import Contribution, Row, Shares
from swift.runtime.reroutable import hooked_parameter, problem_of
from swift.runtime.rerouted_call import Inputs, ReroutedCall
from swift.runtime.routes import Call, Routes, Seconds, call_of, equal_seconds, seconds_of
from swift.runtime.transfers import measures, transfer_s
from swift.runtime.vacancy_trial import Left, all_told, difference, left_by, summed, with_vacancies

_WHOLE, _SPLIT = 1, 2
_NO_CALL = "and a train_step that does not call the schedule"
_ONE_CALL = (
    "and a train_step that calls the schedule more than once: while a rank is missing only one call, which trains, can "
    "be shared"
)


class Rerouting(Adoption):
    """One rank's. Trainer's thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._capturing = False
        self._captured: Inputs | None = None
        self._inputs: dict[int, Inputs] = {}
        """By origin: what enters this rank's stages from outside, in the step under way."""
        self._call: ReroutedCall | None = None
        """Of the step under way."""
        self._calls = 0
        """Of the schedule, in the step under way."""
        self._splits: bool | None = None
        """All ranks get the same bits from split backwards. None: it is not known here."""
        self._trying = False
        """Whether they do."""
        self._seconds: Seconds | None = None
        """That stages take, as all have told at the beginning of this generation."""
        self._transfer = math.nan
        """Seconds of a message to the next stage's rank, when it was measured last."""
        self._plans = PlansAhead(self._slot, self._world)
        self._batches = FetchedBatches(self._slot, self._assignment, self._world, self.loaders)
        self._weights_share: dict[int, float] = {}
        """Stage -> of the time that a split backward takes, what gradients of weights take."""
        self._stops = False
        """A step ends with its call of the schedule, and is taken back."""
        self._evaluates = False
        """In such a step the schedule was called before that for something else."""
        self._schedule: Any = None
        """Whose call the step under way trains by. A trainer may have several."""
        self._looks_again = False
        """The first step may have hung hooks upon parameters."""
        self._left: Left | None = None
        """By that call."""
        self._pretended: Assignment | None = None
        """In this step, slots of this one are taken for vacant."""
        self._made: list[tuple[int, int]] | None = None
        """Of gradients, as the schedule has left them: which, and of which version. None: nobody need look."""

    def arm(self, *, at_start: bool) -> None:
        """As `Adoption.arm`."""
        super().arm(at_start=at_start)
        self._looks_again = at_start and self._wanted

    def check(self) -> None:
        """As `Adoption.check`."""
        if not self._state.schedules:
            raise self._config.not_shared("without a pipeline schedule: microbatches are shared")
        for schedule in self._state.schedules:
            dp_size = self._assignment().dp_size
            if problem := problem_of(schedule, dp_size, exact_gradients=self._config.exact_gradients):
                raise self._config.not_shared(f"with {type(schedule).__name__}: {problem}")
        super().check()

    def shares(self) -> Shares | None:
        """As `Adoption.shares`."""
        assignment = self._assignment()
        if not assignment.adopted:
            return None
        if self._call is None:
            raise self._config.not_shared(
                "and gradients that no call of the schedule has made: it is called once in each step"
            )
        if not self._config.exact_gradients:
            return None
        slots = assignment.group(self._slot)
        origins = [assignment.slots[slot].dp_rank for slot in slots]
        return self._call.shares(slots, origins)

    def before(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> None:
        """As `Adoption.before`: learns what enters the schedule of the origins of which this rank computes some."""
        self._call, self._inputs, self._calls, self._made = None, {}, 0, None
        self._answers.reduced = False
        if self._channel.replaying:
            return
        self._tell_apart(step)
        if self._begins:
            self._begin(train_step, step, drop)
        elif measures(step) and not self._assignment().vacant:
            self._measure_transfers()
            self._prepare(self._told_seconds())
        else:
            self._plans.go_on()
        self._fetch(adopters(self._assignment()), train_step, step, drop)
        self._inputs = self._inputs_of(self._assignment(), train_step, step, drop)

    def _inputs_of(
        self,
        assignment: Assignment,
        train_step: Callable[[int], object],
        step: int,
        drop: Callable[[], None],
    ) -> dict[int, Inputs]:
        """Of each origin of which this rank computes some."""
        group, inputs = assignment.slots[self._slot].stage_group, dict[int, Inputs]()
        self._capturing = True
        try:
            for origin in assignment.adopted_by(self._slot):
                taken = self._carried_out(origin, train_step, step, drop, self._taken)
                # Gradients that were there before are a part of those of the first microbatch.
                begins = assignment.owner(group, origin, 0) == self._slot
                inputs[origin] = taken if begins else taken._replace(gradients={})
            return inputs
        finally:
            self._capturing = False

    def _fetch(
        self, wanted: Wanted, train_step: Callable[[int], object], step: int, drop: Callable[[], None]
    ) -> None:
        """(all ranks) What enters steps of origins whose loaders this rank cannot make."""
        if self._config.fetch_batches:
            for words in self._batches.fetch(wanted, lambda: self._drawn(train_step, step, drop)):
                self._differences.say(step, words)

    def _drawn(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> Drawn:
        """By this rank's own step, up to the call of the schedule."""
        self._capturing = True
        try:
            with self.loaders.writing() as written:
                self._carried_out(self._channel.origin, train_step, step, drop, self._taken)
            return written
        finally:
            self._capturing = False

    def _try_to_fetch(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> None:
        """Whether any rank of a pipeline has what a lost one would have drawn."""
        if not self._config.fetch_batches:
            return
        drawn = self._drawn(train_step, step, drop)
        if ranks := self._batches.apart(drawn):
            self._refuse(
                step,
                "with fetch_batches=True was tried out: loaders of ranks {} and {}, of one pipeline, have given "
                "different things".format(*ranks),
                "make the same loaders on all ranks of a pipeline, and draw the same from them in each step",
            )
        self._batches.fetch(neighbours(self._assignment(), self._next_to()), lambda: drawn)

    def _before_reduction(self) -> None:
        made, self._made = self._made, None
        if made is not None and made != self._versions():
            raise self._config.not_shared(
                "and a train_step that changes gradients between schedule.step and their reduction: those that others "
                "compute for a lost rank would stay as they are",
                "call session.reduce_gradients() first",
            )
        super()._before_reduction()

    def _versions(self) -> list[tuple[int, int]]:
        parameters = chain.from_iterable(stage.submod.parameters() for stage in self._state.stages)
        return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]

    def after(self) -> None:
        """As `Adoption.after`."""
        super().after()
        if self._calls > 1:
            raise self._config.not_shared(_ONE_CALL)
        if self._looks_again:
            self._looks_again = False
            self._check_hooks(self._channel.step)

    def _begin(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> None:
        """The first step of a generation."""
        self._begins, self._seconds = False, None
        self._plans.begin()
        self._agree_on_shapes()
        self._check_hooks(step)
        if not self._assignment().adopted:
            if self._try_due():
                self._try_all(train_step, step, drop)
            self._prepare(self._told_seconds())
            return
        # A process that has come while ranks are missing cannot try it out. Its peers run the same stages, and have.
        own = torch.tensor([self._tried], dtype=torch.uint8)
        if not any(map(bool, self._data.gathered(own))):
            self._differences.say(
                step, "nobody was left to try out whether one rank can compute another's batches"
            )
        # A process that has come meanwhile does not know.
        (whole, split) = (_WHOLE, _SPLIT) if self._splits is not None else (0, 0)
        known = torch.tensor([split if self._splits else whole], dtype=torch.uint8)
        self._splits = max(int(each) for each in self._world.gathered(known)) == _SPLIT
        self._seconds = self._told_seconds()
        ahead = self._plans.agree(self._calls_of(self._assignment()))
        events.emit(
            "planned_by",
            rank=self._slot,
            step=step,
            splits=self._splits,
            seconds=self._seconds.stages,
            transfer=self._seconds.transfer,
            ahead=ahead,
        )
        self._prepare(self._seconds)

    def _try_all(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> None:
        """(all ranks, nobody is missing) A loss may cut this short. Who has not tried it before then still has not."""
        tried, self._tried = self._tried, False
        passed = tried
        try:
            self._try_to_fetch(train_step, step, drop)
            self._try_out(train_step, step, drop)
            in_torchs_way = self._left_by_call(train_step, step, drop)
            self._try_to_split(in_torchs_way, train_step, step, drop)
            self._try_vacancies(in_torchs_way, train_step, step, drop)
            passed = True
        finally:
            self._tried = passed

    def _check_hooks(self, step: int) -> None:
        """A sum that is as large as a threshold comes long after the first step, so no trial finds this."""
        name = hooked_parameter(self._state.stages if self._config.exact_gradients else ())
        if not name:
            return
        error = self._config.not_shared(
            "and a hook that is called when a gradient has been added up "
            f"(register_post_accumulate_grad_hook of {name!r}): a lost rank's peers add those of their microbatches "
            "apart from each other",
            "do that behind schedule.step and session.reduce_gradients(), or use register_hook, which is called with "
            "each microbatch's gradient",
        )
        if self._at_start:
            raise error
        self._differences.say(step, str(error))

    def _stage_count(self) -> int:
        """Of the schedule. (An assignment of this process counts each stage group as one.)"""
        (schedule, *_) = self._state.schedules
        return int(_torch.schedule_stages(schedule)[0].num_stages)

    def _told_seconds(self) -> Seconds:
        """(all ranks) What each stage takes, from what all have measured. The same at each: they plan by it."""
        own = torch.full((self._stage_count() + 1, 3), math.nan, dtype=torch.float64)
        for stage, taken in self._channel.profile.stage_seconds().items():
            share = self._weights_share.get(stage, math.nan)
            own[stage] = torch.tensor([*taken, share], dtype=torch.float64)
        own[-1, 0] = self._transfer
        told = self._world.gathered(own)
        return seconds_of([rows[:-1] for rows in told], [float(rows[-1, 0]) for rows in told])

    def _measure_transfers(self) -> None:
        """(all ranks, none is missing) What a message to the next stage's rank takes."""
        assignment = self._assignment()
        own = torch.tensor([self._channel.profile.message_bytes()], dtype=torch.int64)
        told = dict(zip(assignment.occupied, map(int, self._world.gathered(own)), strict=True))
        sizes = {assignment.slots[slot].stage_group: told[slot] for slot in assignment.representatives()}
        known = {group: size for group, size in sizes.items() if size}
        self._transfer = transfer_s(self._world, assignment, self._slot, known)

    def _prepare(self, seconds: Seconds) -> None:
        """While ranks train, they plan for the loss that may come next."""
        self._plans.prepare(self._assignment(), self._calls_of, seconds)

    def _try_to_split(
        self, in_torchs_way: Left, train_step: Callable[[int], object], step: int, drop: Callable[[], None]
    ) -> None:
        """Backwards are split, in steps that lack ranks, if that gives each rank the same bits as the schedule does.

        It does as a rule. It does not for parameters that are used in a sum or twice (`x @ (a + b)`), of which torch
        2.13 computes wrong gradients when it splits, and where a stage has hooks that are not called then.
        """
        equal, must = False, next(filter(_torch.splits_backward, self._state.schedules), None)
        if self._config.split_backward or must is not None:
            self._trying = True
            try:
                left = self._left_by_call(train_step, step, drop)
            finally:
                self._trying, self._call = False, None
            taken = self._channel.profile.backwards()  # of this call alone
            self._weights_share = {stage: part / whole for stage, (whole, part) in taken.items() if part > 0}
            equal = not difference(self._state.stages, in_torchs_way, left)
        told = torch.tensor([equal], dtype=torch.uint8)
        self._splits = all(bool(each) for each in self._world.gathered(told))
        if must is not None and not self._splits:
            raise self._config.not_shared(
                f"with {type(must).__name__}: where each microbatch's gradients are computed by themselves, they "
                "have other bits"
            )
        events.emit("splits_backward", rank=self._slot, own=equal, all=self._splits)

    def _try_vacancies(
        self, in_torchs_way: Left, train_step: Callable[[int], object], step: int, drop: Callable[[], None]
    ) -> None:
        """Whether a step that lacks ranks would have the same bits (`swift.runtime.vacancy_trial`)."""
        assignment, stages = self._assignment(), self._state.stages
        if assignment.vacant:
            return  # nobody's batch is to be computed by others, or it would be adopted
        if not self._config.exact_gradients:
            return  # other bits are allowed, and there may be no memory to keep gradients apart
        # Those that are taken for vacant do not call the schedule, so all have to know.
        evaluates = self._world.gathered(torch.tensor([self._evaluates], dtype=torch.uint8))
        if any(bool(each) for each in evaluates):
            if self._at_start:
                raise self._config.not_shared(_ONE_CALL)
            return  # a recovery has led to such a step, and nobody is missing
        pretended = with_vacancies(assignment)
        routes, here = self._routes_of(pretended, self._schedule), self._slot in pretended.members
        group = assignment.group(self._slot)
        rows = [
            routes.share_of(slot, assignment.slots[slot].dp_rank) if slot in pretended.members else []
            for slot in group
        ]
        left, mine, held = in_torchs_way, list[Contribution](), 0
        self._fetch(adopters(pretended), train_step, step, drop)
        if here:
            mine_of = rows[group.index(self._slot)]
            left, mine, held = self._left_in(pretended, mine_of, train_step, step, drop)
        theirs = summed(self._data, stages, rows, mine, _torch.schedule_grad_scale(self._schedule))
        if not here:
            left = in_torchs_way._replace(gradients=theirs)
        told = all_told(self._world, difference(stages, in_torchs_way, left))
        events.emit(
            "vacancies_tried", rank=self._slot, step=step, vacant=list(pretended.vacant), gradient_bytes=held
        )
        slot, what = next((pair for pair in zip(assignment.occupied, told, strict=True) if pair[1]), (0, ""))
        if what:
            lost = " and ".join(map(str, pretended.vacant)) if len(pretended.vacant) < 3 else "of all stages"
            self._refuse(
                step,
                f"was tried out as if ranks {lost} were lost, and {what} for the batch of rank {slot} has other bits: "
                "what belongs to a batch must reach stages and loss as an argument of schedule.step, and a forward "
                "must not depend on earlier ones",
            )

    def _left_in(
        self,
        pretended: Assignment,
        rows: Sequence[Row],
        train_step: Callable[[int], object],
        step: int,
        drop: Callable[[], None],
    ) -> tuple[Left, list[Contribution], int]:
        """What a call leaves in this world, in which this rank is there; what it has in each of these rows; and the
        bytes that it held of them."""
        self._inputs = self._inputs_of(pretended, train_step, step, drop)
        self._pretended = pretended
        try:
            left = self._left_by_call(train_step, step, drop)
        finally:
            self._pretended, self._inputs = None, {}
        call, self._call = self._call, None
        assert call is not None
        return left, call.contributions(rows), call.bytes_max

    def _left_by_call(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> Left:
        """What the call of the schedule leaves, in a step of this rank's own that is taken back."""
        self._stops, self._evaluates = True, False
        try:
            return self._carried_out(self._channel.origin, train_step, step, drop, self._what_is_left)
        finally:
            self._stops = False

    def _what_is_left(self) -> Left:
        left, self._left = self._left, None
        if left is None:
            raise self._config.not_shared(_NO_CALL)
        return left

    def _taken(self) -> Inputs:
        taken, self._captured = self._captured, None
        if taken is None:
            raise self._config.not_shared(_NO_CALL)
        return taken

    def reroute(self, schedule: Any, inner: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """(the schedule is called) Raises Computed once what is wanted of the call is there, UsageError for a call
        that others cannot carry out."""
        self._answers.early = False
        entering = [value for name, value in arguments.items() if name != "losses"]
        tensors = (leaf for leaf in pytree.tree_leaves(entering) if isinstance(leaf, torch.Tensor))
        if any(tensor.requires_grad for tensor in tensors):
            raise self._config.not_shared(
                "and an input of the schedule that requires a gradient: nobody would compute it for another rank",
                "detach it, or compute it inside of the stage",
            )
        if self._capturing:
            _torch_calls.split_inputs(schedule, arguments)
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
        trains = all(stage.has_backward for stage in _torch.schedule_stages(schedule))
        self._schedule = schedule if trains else self._schedule
        self._calls += trains and not (self.under_way or self._channel.rehearsing)
        self._evaluates = self._evaluates or (self._stops and not trains)
        given = self._called(schedule, inner, arguments, trains=trains)
        if self._stops and trains:
            self._left = left_by(schedule, arguments, self._state.stages, self._state.objects)
            raise Computed
        return given

    def _called(
        self, schedule: Any, inner: Callable[[], Any], arguments: dict[str, Any], *, trains: bool
    ) -> Any:
        assignment = self._pretended or self._assignment()
        if not assignment.adopted and not (self._trying and trains):
            return self._in_torchs_way(schedule, inner)
        if self._calls > 1 or not trains:
            raise self._config.not_shared(_ONE_CALL)
        apart = self._config.exact_gradients
        self._call = ReroutedCall(
            self._routes_of(assignment, schedule),
            self._slot,
            self._channel.origin,
            self._channel,
            self._world,
            quiet=self._quietly,
            apart=apart,
            not_shared=self._config.not_shared,
        )
        if not (apart or self._trying):
            self._answers.name(
                self._channel.step, "gradients of a lost rank's microbatches were added to other ranks' own"
            )
        rehearsing, self._channel.rehearsing = self._channel.rehearsing, True  # nothing is replayed of it
        try:
            self._call.run(schedule, arguments, self._inputs)
        finally:
            self._channel.rehearsing = rehearsing
        for origin in self._inputs if self._pretended is None else ():
            mine = self._call.computed(origin)
            events.emit(
                "adopted_step",
                rank=self._slot,
                step=self._channel.step,
                origin=origin,
                microbatches=mine,
                gradient_bytes=self._call.bytes_max,
            )
        self._inputs = {}
        return None

    def _routes_of(self, assignment: Assignment, schedule: Any) -> Routes:
        seconds = self._seconds or equal_seconds(self._stage_count())
        return self._plans.routes(self._call_of(assignment, schedule), seconds)

    def _calls_of(self, assignment: Assignment) -> list[Call]:
        """Of each schedule that trains."""
        return [
            self._call_of(assignment, schedule)
            for schedule in self._state.schedules
            if _torch.trains(schedule)
        ]

    def _call_of(self, assignment: Assignment, schedule: Any) -> Call:
        return call_of(
            assignment,
            schedule,
            split=self._trying or bool(self._splits),
            memory=self._config.adaptive_memory,
            staggered=self._config.staggered,
        )

    def _in_torchs_way(self, schedule: Any, inner: Callable[[], Any]) -> Any:
        """Nobody is missing."""
        given = inner()
        if any(_torch_calls.skips_stages(stage) for stage in _torch.schedule_stages(schedule)):
            raise self._config.not_shared(
                "and a stage that passes tensors by a stage: they go from one stage to the next"
            )
        self._made = self._versions()
        return given

    @contextmanager
    def _quietly(self) -> Any:
        quiet, self._witness.quiet = self._witness.quiet, True
        try:
            yield
        finally:
            self._witness.quiet = quiet
