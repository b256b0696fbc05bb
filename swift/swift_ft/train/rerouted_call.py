"""One call of a schedule in a degraded world: its ranks compute microbatches of other origins among their own.

torch's schedules give each stage one rank, so this module carries the call out itself. Each rank executes its own list
of actions, sends its results to the rank that computes the next part, and keeps the gradients of other origins
separate.
"""

import copy
import inspect
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import schedules as _schedules

from swift_ft import torch_private
from swift_ft.comm.backend import COLLECTIVES, REROUTED, Collectives, Pending
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.planner import Assignment
from swift_ft.planner.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Costs,
    Work,
    found_steps,
    owners_of,
    period,
    plan_step,
)
from swift_ft.state.module_state import KeptModules
from swift_ft.state.transfer import local
from swift_ft.train.batch_redistribution import Accumulator, OwnGradients
from swift_ft.train.participants import Site
from swift_ft.train.reducer import Contribution, Row, Shares, Whole, check_dense

# Private names of torch's schedules and stages that are needed to carry out a call in a schedule's place.
#
# `torch_private` has the rest.

torch_private.require(
    {
        "torch.distributed.pipelining.schedules._PipelineSchedule": (
            _schedules._PipelineSchedule,
            ("_check_inputs", "_compute_loss", "_update_losses"),
        )
    }
)


def activations_held(schedule: Any) -> tuple[int, ...] | None:
    """Returns the maximum number of activations held at a time, over its stages, for each pipeline rank. None if it is
    not known for this schedule."""
    count = torch_private.schedule_microbatches(schedule)
    if type(schedule) is _schedules.Schedule1F1B:
        return tuple(min(count, schedule._num_stages - rank) for rank in range(schedule._num_stages))
    if type(schedule) is _schedules.ScheduleGPipe:
        return (count,) * schedule._num_stages
    if torch_private.schedule_actions(schedule) is None:
        return None
    return tuple(
        _most_held(torch_private.actions_of(schedule.pipeline_order_with_comms[rank]))
        for rank in sorted(schedule.pipeline_order_with_comms)
    )


def _most_held(actions: Iterable[tuple[int, str, int]]) -> int:
    held = most = 0
    for _, kind, _ in actions:
        held += (kind == "F") - (kind in "BW")
        most = max(most, held)
    return most


def instead_of_calls(schedule: Any, call: Any) -> None:
    """Makes the schedule run ``call(schedule, inner, arguments)`` instead of its own execution of microbatches. `inner`
    is that execution as a function without arguments; `arguments` are by name."""
    inner = schedule._step_microbatches
    signature = inspect.signature(inner)

    def step_microbatches(*args: Any, **kwargs: Any) -> Any:
        return call(schedule, lambda: inner(*args, **kwargs), signature.bind(*args, **kwargs).arguments)

    schedule._step_microbatches = step_microbatches


def split_inputs(schedule: Any, call: dict[str, Any]) -> None:
    """Sets `arg_mbs` and `kwarg_mbs` of a call's arguments to lists with one entry for each microbatch."""
    given = [call.get(key) for key in ("arg_mbs", "kwarg_mbs", "target_mbs", "losses")]
    call["arg_mbs"], call["kwarg_mbs"] = schedule._check_inputs(*given)


def initialize_stages(schedule: Any, call: dict[str, Any]) -> None:
    """Does what every schedule does first in a call with these arguments; infers shapes in the first call."""
    split_inputs(schedule, call)
    arg_mbs, kwarg_mbs = call["arg_mbs"], call["kwarg_mbs"]
    targets = call.get("target_mbs")
    first = (arg_mbs[0], kwarg_mbs[0], targets[0] if targets is not None else None)
    initialize = getattr(schedule, "_initialize_stages", None) or schedule._initialize_stage
    loss = (call.get("loss_kwargs"),) if len(inspect.signature(initialize).parameters) > 3 else ()
    initialize(*first, *loss)


def skips_stages(stage: Any) -> bool:
    """Returns whether the stage receives from a stage other than the previous one, or sends to one other than the
    next."""
    sources = {info.source for info in stage.args_recv_info.get(0, ()) if not info.is_root_arg}
    sent = {to for stages in stage.act_send_info.values() for to in stages if to is not None}
    return bool(sources - {stage.stage_index - 1} or sent - {stage.stage_index + 1})


def compute_loss(schedule: Any, output: Any, target: Any, loss_kwargs: Any) -> Any:
    """Returns the loss of one microbatch; None if the schedule has no loss function."""
    if schedule._loss_fn is None:
        return None
    loss = (loss_kwargs,) if loss_kwargs is not None else ()
    return schedule._compute_loss(output, target, *loss)


def give_losses(schedule: Any, own: list[Any], call: dict[str, Any]) -> None:
    """Stores the losses of this rank's own microbatches, in their order, where the trainer expects them."""
    schedule._internal_losses[:] = own
    schedule._update_losses(torch_private.schedule_stages(schedule), call.get("losses"))


def free_chunk(stage: Any) -> int:
    """Returns the first microbatch number that no schedule of the stage uses."""
    return 1 + max((*stage.args_recv_info, *stage.grad_recv_info), default=-1)


@contextmanager
def more_chunks(stage: Any, chunks: Iterable[int]) -> Iterator[None]:
    """Returns a context in which the stage also has receive buffers for these microbatch numbers, shaped like those of
    microbatch 0."""
    before, chunks = stage.chunks, list(chunks)
    for infos in (stage.args_recv_info, stage.grad_recv_info):
        for chunk in chunks:
            if 0 in infos:
                infos[chunk] = tuple(_alike(info) for info in infos[0])
    stage.chunks = free_chunk(stage)
    try:
        yield
    finally:
        for chunk in chunks:
            stage.args_recv_info.pop(chunk, None)
            stage.grad_recv_info.pop(chunk, None)
        stage.chunks = before


def _alike(info: Any) -> Any:
    other = copy.copy(info)
    if getattr(info, "buffer", None) is not None:
        other.buffer = torch.empty_like(info.buffer, requires_grad=info.buffer.requires_grad)
    return other


# Sums of the gradients of batches that several ranks compute, while they compute them.
#
# The peers of a lost rank share its microbatches. A floating-point sum over microbatches has the lost rank's bits only
# if it is added in the same order, one microbatch after the other. Collecting all gradients first would cost each peer
# a copy per adopted microbatch. So each of the k peers keeps one k-th of the sum. The rank that computes a microbatch
# sends each peer its part of the gradients, and each peer adds the parts in order.
#
#     (trainer's thread)  ``give`` each microbatch's gradients once computed … ``wait``; ``abandon`` in any case
#     (group's runner)    sends, receives, adds
#
# A rank holds its part of each sum, its parts of the next two microbatches, and its own gradients that are not sent
# yet. This is independent of the number of microbatches if the schedule limits how far a rank is ahead of others.

Parameter = torch.nn.Parameter

_ARRIVING = 2
"""Microbatches in transfer at a time: two peers send, and the others keep their computed gradients."""


class Turn(NamedTuple):
    """A microbatch of an origin, at a stage."""

    stage: int
    origin: int
    microbatch: int
    owner: int
    """Place, in the group, of the rank that computes the microbatch."""


class Numbers:
    """Flattened elements of some parameters of one dtype, partitioned over `count` ranks."""

    def __init__(self, parameters: Iterable[Parameter], count: int) -> None:
        self.parameters = list(parameters)
        self.dtype = self.parameters[0].dtype
        *begins, self._end = accumulate((local(p).numel() for p in self.parameters), initial=0)
        self._begins = dict(zip(self.parameters, begins, strict=True))
        self._flags = {p: number - len(self.parameters) for number, p in enumerate(self.parameters)}
        """Parameter -> index, in a part, of the flag that says whether it has a gradient."""
        self._size = -(-self._end // count)

    def of(self, parameter: Parameter, place: int) -> tuple[slice, slice]:
        """Returns the slice of the parameter's elements that this place has, and their slice in its part."""
        begin, (low, high) = self._begins[parameter], self._bounds(place)
        first = max(begin, low)
        last = max(min(begin + local(parameter).numel(), high), first)
        return slice(first - begin, last - begin), slice(first - low, last - low)

    def length(self, place: int) -> int:
        """Returns the length of this place's `part`."""
        low, high = self._bounds(place)
        return high - low + len(self.parameters)

    def part(self, gradients: Mapping[Parameter, torch.Tensor], place: int) -> torch.Tensor:
        """Returns this place's part of the gradients [length]: its elements, then per parameter 1 if it has a gradient.
        Elements without a gradient are -0.0, which changes no bit of a sum (0.0 turns -0.0 into 0.0)."""
        part = torch.empty(self.length(place), dtype=self.dtype)
        for parameter, flag in self._flags.items():
            theirs, here = self.of(parameter, place)
            gradient = gradients.get(parameter)
            part[flag] = gradient is not None
            part[here] = -0.0 if gradient is None else local(gradient).reshape(-1)[theirs]
        return part

    def is_given(self, part: torch.Tensor, parameter: Parameter) -> bool:
        """Returns whether one of the microbatches summed in `part` has a gradient of the parameter."""
        return bool(part[self._flags[parameter]])

    def _bounds(self, place: int) -> tuple[int, int]:
        return min(place * self._size, self._end), min((place + 1) * self._size, self._end)


class PartOfSum:
    """`reducer.Contribution` with a rank's part of the sum over an origin's microbatches."""

    def __init__(self, place: int, sums: Iterable[tuple[Numbers, torch.Tensor]]) -> None:
        """`sums` of `Numbers.part` over all microbatches."""
        self._place = place
        self._sums = {p: (numbers, total) for numbers, total in sums for p in numbers.parameters}

    def has(self, parameter: Parameter) -> bool:
        """Returns whether some microbatch has a gradient of the parameter; False for a frozen one."""
        if parameter not in self._sums:
            return False
        numbers, total = self._sums[parameter]
        return numbers.is_given(total, parameter)

    def numbers(self, parameter: Parameter) -> torch.Tensor:
        """Returns the sum's elements of this place, -0.0 for those of other places. Zeros for a parameter without a
        gradient, as on the origin's own rank."""
        if parameter not in self._sums:
            return torch.zeros(local(parameter).numel(), dtype=parameter.dtype)
        numbers, total = self._sums[parameter]
        mine, here = numbers.of(parameter, self._place)
        row = torch.full((local(parameter).numel(),), -0.0, dtype=parameter.dtype)
        row[mine] = total[here] if self.has(parameter) else 0.0
        return row


class SharedSums:
    """Sums of one call of a schedule, on one rank."""

    def __init__(
        self,
        group: ReconfigurableGroup,
        place: int,
        count: int,
        turns: Sequence[Turn],
        parameters: Mapping[int, Iterable[Parameter]],
    ) -> None:
        """(all ranks of the group) Starts the exchange and returns at once. `group` must have no other traffic
        meanwhile; this rank is at `place` of `count`. `turns`: equal on all ranks, ascending within each origin and
        stage. `parameters` of each stage."""
        self._place, self._count, self._turns = place, count, turns
        self._numbers = {stage: _by_dtype(of_stage, count) for stage, of_stage in parameters.items()}
        self._changed = threading.Condition()
        self._computed: dict[Turn, list[list[torch.Tensor]]] = {}
        """Computed turn -> by dtype, the part of each place."""
        self._abandoned = False
        self._sums: dict[tuple[int, int], list[torch.Tensor]] = {}
        """(stage, origin) -> this rank's part, by dtype."""
        self._bytes = 0
        self.bytes_max = 0
        """Maximum bytes that this rank held at a time."""
        self._task = group.submit(self._run)

    def give(self, turn: Turn, gradients: Mapping[Parameter, torch.Tensor]) -> None:
        """Adds a microbatch that this rank has computed. Raises UsageError for a sparse gradient."""
        check_dense(gradients.values())
        places = range(self._count)
        parts = [[row.part(gradients, place) for place in places] for row in self._numbers[turn.stage]]
        with self._changed:
            self._computed[turn] = parts
            self._hold(sum(part.nbytes for of_dtype in parts for part in of_dtype))
            self._changed.notify()

    def wait(self) -> None:
        """Waits until all turns are summed. Raises RuntimeError if a peer is lost."""
        self._task.wait()

    def abandon(self) -> None:
        """Ends the runner's wait for further `give` calls, because none will follow."""
        with self._changed:
            self._abandoned = True
            self._changed.notify()

    def part(self, origin: int) -> PartOfSum:
        """Returns this rank's part of the origin's sum over all stages. Valid once `wait` has returned."""
        return PartOfSum(
            self._place,
            (
                pair
                for (stage, of), totals in self._sums.items()
                if of == origin
                for pair in zip(self._numbers[stage], totals, strict=True)
            ),
        )

    # --- runner ---

    def _run(self, collectives: Collectives) -> None:
        arriving: deque[tuple[Turn, list[_Exchange]]] = deque()
        for turn in self._turns:
            if len(arriving) == _ARRIVING:
                self._add(*arriving.popleft())
            arriving.append((turn, self._exchanged(turn, collectives)))
        while arriving:
            self._add(*arriving.popleft())

    def _exchanged(self, turn: Turn, collectives: Collectives) -> "list[_Exchange]":
        mine = self._wait_computed(turn) if turn.owner == self._place else None
        exchanges = []
        for number, row in enumerate(self._numbers[turn.stage]):
            nothing = torch.empty(0, dtype=row.dtype)
            incoming, outgoing = [nothing] * self._count, [nothing] * self._count
            if mine is not None:
                outgoing = mine[number]
                incoming[self._place] = outgoing[self._place]
            else:
                incoming[turn.owner] = torch.empty(row.length(self._place), dtype=row.dtype)
                self._hold(incoming[turn.owner].nbytes)
            pending = collectives.begin_all_to_all(incoming, outgoing)
            exchanges.append(_Exchange(pending, incoming[turn.owner], outgoing))
        return exchanges

    def _wait_computed(self, turn: Turn) -> list[list[torch.Tensor]]:
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or turn in self._computed)
            if turn not in self._computed:
                raise RuntimeError("connection: this call of the schedule has ended")
            return self._computed.pop(turn)

    def _add(self, turn: Turn, exchanges: "list[_Exchange]") -> None:
        key = turn.stage, turn.origin
        for pending, _, _ in exchanges:
            pending.wait()
        if key not in self._sums:
            self._sums[key] = [mine for _, mine, _ in exchanges]
            self._hold(sum(mine.nbytes for _, mine, _ in exchanges))
        else:
            for total, (_, mine, _) in zip(self._sums[key], exchanges, strict=True):
                total.add_(mine)
        for _, mine, sent in exchanges:
            self._hold(-(sum(each.nbytes for each in sent) or mine.nbytes))

    def _hold(self, more: int) -> None:
        with self._changed:
            self._bytes += more
            self.bytes_max = max(self.bytes_max, self._bytes)


class _Exchange(NamedTuple):
    pending: Pending
    mine: torch.Tensor
    sent: list[torch.Tensor]


def _by_dtype(parameters: Iterable[Parameter], count: int) -> list[Numbers]:
    of_dtype: dict[torch.dtype, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            of_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [Numbers(of_one, count) for of_one in of_dtype.values()]


# Distribution and order of the computation in a call of a schedule in a degraded world.
#
# `plan` orders the work (`swift_ft.planner.schedule`). Every rank makes the same plan from the same numbers, once in a
# generation.

Orders = Mapping[int, tuple[Action, ...]]
"""Slot -> its actions in execution order."""


class Routes(NamedTuple):
    """The rank and the order of each computation in a call."""

    work: Work
    orders: Orders

    def owner(self, stage: int, origin: int, microbatch: int) -> int:
        return self.work.owners[stage, origin][microbatch]

    def microbatches_of(self, slot: int, stage: int, origin: int) -> list[int]:
        """Returns the origin's microbatches that this rank computes at the stage, ascending."""
        return [mb for mb, owner in enumerate(self.work.owners[stage, origin]) if owner == slot]

    def is_shared(self, stage: int, origin: int) -> bool:
        return len(set(self.work.owners[stage, origin])) > 1

    def sharers(self, slot: int, own: int) -> list[int]:
        """Returns the ranks that compute at this rank's stages, ascending. `own`: its own origin."""
        stage = self._stages(slot, own)[0]
        return sorted(
            {owner for origin in range(self.work.origins) for owner in self.work.owners[stage, origin]}
        )

    def share_of(self, slot: int, own: int) -> list[Row]:
        """Returns the rows of gradients that a rank has in addition to its own batch's: one for each batch that it has
        adopted alone, and one for its part of each batch that it shares with peers."""
        stage, place = self._stages(slot, own)[0], self.sharers(slot, own).index(slot)
        rows = []
        for origin in range(self.work.origins):
            if self.is_shared(stage, origin):
                rows.append(Row(origin, place))
            elif origin != own and slot in self.work.owners[stage, origin]:
                rows.append(Row(origin, 0))
        return rows

    def turns(self, slot: int, own: int) -> list[Turn]:
        """Returns the order in which a rank and its peers sum shared gradients: about the order of computation, with
        each origin's microbatches ascending."""
        sharers, stages = self.sharers(slot, own), self._stages(slot, own)
        ends = {
            (action.stage, action.origin, action.microbatch): (number + 1) / len(self.orders[each])
            for each in sharers
            for number, action in enumerate(self.orders[each])
            if action.kind in (BACKWARD, BACKWARD_WEIGHT)
        }
        turns = []
        for stage in stages:
            for origin in range(self.work.origins):
                latest = 0.0
                for mb, owner in enumerate(
                    self.work.owners[stage, origin] if self.is_shared(stage, origin) else ()
                ):
                    latest = max(latest, ends[stage, origin, mb])
                    turns.append((latest, Turn(stage, origin, mb, sharers.index(owner))))
        return [turn for _, turn in sorted(turns)]

    def _stages(self, slot: int, own: int) -> list[int]:
        """Returns the stages of this rank. It computes the same microbatches at each of them."""
        owners = self.work.owners
        return [stage for stage, origin in owners if origin == own and slot in owners[stage, own]]


Seconds = tuple[tuple[float, float, float], ...]
"""For each stage, durations per microbatch, in any unit: forward, backward for inputs, backward for weights."""


def equal_seconds(stages: int) -> Seconds:
    """Returns the default without measurements: equal stages, a backward twice as long as a forward."""
    return tuple(_in_parts(1.0, 2.0, stage, stages) for stage in range(stages))


def seconds_of(told: Sequence[torch.Tensor]) -> Seconds:
    """Returns the medians of all ranks' measurements, in units of the mean forward.

    `told`: for each rank, [stages, 2] of forward and whole backward; nan where unknown. If a stage's times are unknown
    to all, assumes equal stages.
    """
    taken = torch.stack(list(told)).nanmedian(dim=0).values
    stages = len(taken)
    if not bool(torch.isfinite(taken).all() and (taken > 0).all()):
        return equal_seconds(stages)
    # fsum rounds once, on every CPU alike: all ranks plan by the same numbers.
    mean = math.fsum(taken[:, 0].tolist()) / stages
    return tuple(
        _in_parts(forward / mean, backward / mean, stage, stages)
        for stage, (forward, backward) in enumerate(taken.tolist())
    )


def _in_parts(forward: float, backward: float, stage: int, stages: int) -> tuple[float, float, float]:
    """Takes half of a backward for its weights' part, and all of the first stage's, where torch computes it so."""
    weights = backward if stage == 0 and stages > 1 else backward / 2
    return forward, backward - weights, weights


def costs_of(seconds: Seconds) -> Costs:
    forward, inputs, weights = zip(*seconds, strict=True)
    return Costs(forward=forward, backward_input=inputs, backward_weight=weights)


def work_of(assignment: Assignment, schedule: Any, seconds: Seconds, *, split: bool, memory: float) -> Work:
    """Returns the work of a call of this schedule under this assignment. Raises ValueError if a microbatch has no
    owner.

    `split`: backwards are split, even if the schedule's are whole. `memory`: limit on the activations that a rank
    holds, as a multiple of those that it holds in the schedule.
    """
    stages = torch_private.schedule_stages(schedule)
    groups = dict(stages[0].stage_index_to_group_rank)
    microbatches = torch_private.schedule_microbatches(schedule)
    # This process's assignment counts each stage group as one stage.
    of_groups = owners_of(assignment, microbatches)
    held = activations_held(schedule)
    caps = None if held is None else [math.ceil(count * memory) for count in held]
    return Work(
        stages=len(groups),
        origins=assignment.dp_size,
        microbatches=microbatches,
        owners={
            (stage, origin): of_groups[group, origin]
            for stage, group in sorted(groups.items())
            for origin in range(assignment.dp_size)
        },
        split=split or torch_private.splits_backward(schedule),
        costs=costs_of(seconds),
        cap=None
        if caps is None
        else {slot: caps[assignment.slots[slot].stage_group] for slot in assignment.occupied},
    )


def plan(work: Work, *, staggered: bool) -> Routes:
    """Returns the routes of the fastest order found. `staggered`: steps overlap, so orders are compared by the time
    between two steps."""
    steps = [plan_step(work), *(found_steps(work) if staggered else ())]
    equal = replace(work, costs=costs_of(equal_seconds(work.stages)))
    if work.costs != equal.costs:
        # The planner is a heuristic: sometimes it finds a faster order from equal stage times.
        steps.append(plan_step(equal))
    return Routes(work, min(steps, key=lambda step: period(work, step, staggered=staggered)).orders())


_SLOTS = 16
"""Maximum number of tensors that one stage sends to the next."""
MESSAGES_MAX = (COLLECTIVES - REROUTED) // (2 * _SLOTS)
"""Maximum of stages x origins x microbatches."""


class Inputs(NamedTuple):
    """External inputs of an origin's call of the schedule, at one stage group; sequences are by microbatch."""

    args: Sequence[Any]
    kwargs: Sequence[Any]
    targets: Sequence[Any] | None
    loss_kwargs: Mapping[str, Any] | None = None
    gradients: Mapping[torch.nn.Parameter, torch.Tensor] = MappingProxyType({})
    """Gradients that exist before the call: zeros, or computed by the trainer itself."""


class ReroutedCall:
    """One rerouted call at one rank. Used on the trainer's thread.

    Slots and origins of its routes are cells and replicas (`Assignment.in_cells`). The ranks of a cell do the same in
    the same order, each with the ranks in its own place of other cells, so collectives among them are complete.

    ``run()``, then `shares` for the gradients of other origins. Raises RuntimeError if a peer is lost.
    """

    def __init__(self, site: Site, routes: Routes, quiet: Callable[[], Any]) -> None:
        """`quiet`: returns a context in which the witness is shown no tensors."""
        self._site = site
        self._routes = routes
        self._quiet = quiet
        self._parts = site.config.shards * site.config.tensor_parallel
        """Ranks of a cell."""
        self._slot, self._part = divmod(site.rank, self._parts)
        self._own = site.channel.origin // self._parts
        self._apart = site.config.exact_gradients
        """Gradients of other origins are kept separate."""
        self._accumulators: dict[tuple[int, int], Accumulator] = {}
        """(stage, origin) -> gradients of a batch that this rank computes alone."""
        self._sums: SharedSums | None = None
        self._turns: dict[tuple[int, int, int], Turn] = {}
        """(stage, origin, microbatch) -> its turn in `_sums`."""
        self._modules = KeptModules(())
        self._inputs: Mapping[int, Inputs] = {}
        self._sends: list[Any] = []
        self._chunks: dict[tuple[int, int], int] = {}
        """(origin, microbatch) -> the microbatch number under which the stages keep its tensors."""
        self._scale = 1
        """Divisor of gradients under the schedule that was called. A trainer may have several schedules."""
        self._losses: dict[tuple[int, int], Any] = {}
        """(origin, microbatch) -> loss."""
        self._outputs: dict[int, Any] = {}
        """Microbatch of this rank's own batch -> output of the last stage."""

    def run(self, schedule: Any, call: dict[str, Any], inputs: Mapping[int, Inputs]) -> None:
        """Carries out the call. `call`: arguments of this rank's own call, by name; `inputs`: of other origins."""
        routes, count = self._routes, self._routes.work.microbatches
        self._scale = torch_private.schedule_grad_scale(schedule)
        initialize_stages(schedule, call)
        stages = {stage.stage_index: stage for stage in torch_private.schedule_stages(schedule)}
        self._modules = KeptModules(stage.submod for stage in stages.values())
        self._inputs = inputs
        of = {
            self._own: Inputs(
                call["arg_mbs"], call["kwarg_mbs"], call.get("target_mbs"), call.get("loss_kwargs")
            ),
            **inputs,
        }
        order = routes.orders.get(self._slot, ())
        with self._with_chunks(stages.values(), order):
            arriving = {action: self._receive(stages[action.stage], action) for action in order}
            self._begin_sums(stages)
            try:
                for action in order:
                    with self._as(action.origin):
                        for work in arriving[action]:
                            work.wait()
                        self._do(schedule, stages, action, of[action.origin], call)
                for work in self._sends:
                    work.wait()
                if self._sums is not None:
                    self._sums.wait()
            finally:
                if self._sums is not None:
                    self._sums.abandon()
        own = [self._losses[self._own, mb] for mb in range(count) if (self._own, mb) in self._losses]
        give_losses(schedule, own, call)
        for stage in stages.values():
            if stage.is_last:
                stage.output_chunks[:] = [self._outputs[mb] for mb in sorted(self._outputs)]
            stage.perform_reduce_grad(self._scale)

    def computed(self, origin: int) -> list[int]:
        orders = self._routes.orders.get(self._slot, ())
        return sorted({action.microbatch for action in orders if action.origin == origin})

    def shares(self, slots: Sequence[int], origins: Sequence[int]) -> Shares:
        """(after `run`) Returns this rank's contributions and the rows of all ranks. `slots`, `origins`: of the ranks
        of the data group, by place."""
        rows = [
            [Row(origin), *self._routes.share_of(slot, origin)]
            for slot, origin in zip(slots, origins, strict=True)
        ]
        place = slots.index(self._slot)
        return Shares(rows, place, self.contributions(rows[place][1:]), self._scale)

    def contributions(self, rows: Sequence[Row]) -> list[Contribution]:
        return [self._contribution(row.origin) for row in rows]

    @property
    def bytes_max(self) -> int:
        """Maximum bytes of other origins' gradients that this rank held at a time."""
        whole = sum(
            gradient.nbytes
            for (_, origin), accumulator in self._accumulators.items()
            if origin != self._own
            for gradient in accumulator.gradients.values()
        )
        return whole + (0 if self._sums is None else self._sums.bytes_max)

    # --- ---

    def _begin_sums(self, stages: Mapping[int, Any]) -> None:
        turns = self._routes.turns(self._slot, self._own) if self._apart else []
        if not turns:
            return
        sharers = self._routes.sharers(self._slot, self._own)
        self._turns = {turn[:3]: turn for turn in turns}
        self._sums = SharedSums(
            self._site.world.part([self._rank_in(sharer) for sharer in sharers]),
            sharers.index(self._slot),
            len(sharers),
            turns,
            {index: list(stage.submod.parameters()) for index, stage in stages.items()},
        )

    def _contribution(self, origin: int) -> Contribution:
        if self._sums is not None and any(turn.origin == origin for turn in self._turns.values()):
            return self._sums.part(origin)
        whole: OwnGradients = {}
        for (_, of), accumulator in self._accumulators.items():
            if of == origin:
                whole |= accumulator.gradients
        return Whole(whole)

    @contextmanager
    def _with_chunks(self, stages: Collection[Any], order: Iterable[Action]) -> Iterator[None]:
        """Returns a context in which each stage has buffers for the other origins' microbatches of `order`, under
        numbers that no schedule uses."""
        others = sorted({(a.origin, a.microbatch) for a in order if a.origin != self._own})
        first = max(free_chunk(stage) for stage in stages)
        self._chunks = {each: number for number, each in enumerate(others, first)}
        adopted = {number: microbatch for (_, microbatch), number in self._chunks.items()}
        with ExitStack() as stack:
            for stage in stages:
                stack.enter_context(more_chunks(stage, adopted))
                stage.adopted = adopted
            try:
                yield
            finally:
                for stage in stages:
                    stage.adopted = {}

    def _chunk(self, origin: int, microbatch: int) -> int:
        return microbatch if origin == self._own else self._chunks[origin, microbatch]

    @contextmanager
    def _as(self, origin: int) -> Iterator[None]:
        if origin == self._own:
            yield
            return
        # A forward's changes to its modules (buffers, counters) belong to the origin, so they are undone here.
        self._modules.keep()
        self._modules.lend()
        try:
            with self._quiet(), self._site.channel.as_origin(self._rank_in(origin)):
                yield
        finally:
            self._modules.restore()

    def _tag(self, backward: bool, source: int, action: Action, position: int) -> int:
        work = self._routes.work
        number = (int(backward) * work.stages + source) * work.origins + action.origin
        tag = REROUTED + (number * work.microbatches + action.microbatch) * _SLOTS + position
        if position >= _SLOTS:
            raise self._site.config.not_shared(
                f"and a stage that sends {position + 1} tensors: at most {_SLOTS} are told apart"
            )
        return tag

    def _receive(self, stage: Any, action: Action) -> list[Any]:
        forward = action.kind == FORWARD
        if action.kind == BACKWARD_WEIGHT or (stage.is_first if forward else stage.is_last):
            return []
        source = action.stage + (-1 if forward else 1)
        whose = self._routes.owner(source, action.origin, action.microbatch)
        if whose == self._slot:
            return []
        chunk = self._chunk(action.origin, action.microbatch)
        infos = (stage.args_recv_info if forward else stage.grad_recv_info)[chunk]
        buffers = [info.buffer for info in infos if not info.is_root_arg and info.buffer is not None]
        return [
            self._site.world.recv(
                [buffer.detach()], self._rank_in(whose), self._tag(not forward, source, action, position)
            )
            for position, buffer in enumerate(buffers)
        ]

    def _send(self, stage: Any, action: Action, to_stage: int, ops: Sequence[Any]) -> None:
        to = self._routes.owner(to_stage, action.origin, action.microbatch)
        backward = action.kind != FORWARD
        for position, op in enumerate(ops):
            tag = self._tag(backward, stage.stage_index, action, position)
            self._sends.append(
                self._site.world.send([op.tensor.detach().contiguous()], self._rank_in(to), tag)
            )
        self._site.channel.launched()

    def _do(
        self, schedule: Any, stages: Mapping[int, Any], action: Action, of: Inputs, call: dict[str, Any]
    ) -> None:
        stage, chunk = stages[action.stage], self._chunk(action.origin, action.microbatch)
        if action.kind == FORWARD:
            self._forward(schedule, stages, action, chunk, of, call)
            return
        loss = self._losses.get((action.origin, action.microbatch)) if stage.is_last else None
        last = action.origin == self._own and action.microbatch == self._routes.work.microbatches - 1
        with self._into(stage, action):
            if action.kind == BACKWARD_WEIGHT:
                stage.backward_weight_one_chunk(chunk, last_backward=last)
                return
            stage.backward_one_chunk(
                chunk, loss=loss, full_backward=action.kind == BACKWARD, last_backward=last
            )
        if stage.is_first:
            return
        before = stages.get(action.stage - 1)
        if before is not None and self._is_mine(action.stage - 1, action):
            before.set_local_bwd_input(stage.get_local_bwd_output(chunk), chunk)
        else:
            self._send(stage, action, action.stage - 1, stage.get_bwd_send_ops(chunk))

    def _forward(
        self,
        schedule: Any,
        stages: Mapping[int, Any],
        action: Action,
        chunk: int,
        of: Inputs,
        call: dict[str, Any],
    ) -> None:
        stage, mb, own = stages[action.stage], action.microbatch, action.origin == self._own
        output = stage.forward_one_chunk(chunk, of.args[mb], of.kwargs[mb], save_forward_output=False)
        if stage.is_last:
            if own and call.get("return_outputs", True):
                self._outputs[mb] = output
            if of.targets is not None:
                loss = compute_loss(schedule, output, of.targets[mb], of.loss_kwargs)
                if loss is not None:
                    self._losses[action.origin, mb] = loss
            return
        behind = stages.get(action.stage + 1)
        if behind is not None and self._is_mine(action.stage + 1, action):
            behind.set_local_fwd_input(output, chunk)
        else:
            self._send(stage, action, action.stage + 1, stage.get_fwd_send_ops(chunk))

    def _rank_in(self, cell: int) -> int:
        """Returns the rank of a cell in this one's place; likewise the data-parallel rank of a replica."""
        return cell * self._parts + self._part

    def _is_mine(self, stage: int, action: Action) -> bool:
        return self._routes.owner(stage, action.origin, action.microbatch) == self._slot

    def _into(self, stage: Any, action: Action) -> AbstractContextManager[None]:
        """Returns the context that directs this microbatch's weight gradients to their accumulator."""
        if action.kind == BACKWARD_INPUT or (not self._apart and action.origin != self._own):
            return nullcontext()
        turn = self._turns.get((action.stage, action.origin, action.microbatch))
        if turn is not None:
            return self._giving(stage, turn)
        place, own = (action.stage, action.origin), action.origin == self._own
        if place not in self._accumulators:
            mine = self._routes.microbatches_of(self._slot, action.stage, action.origin)
            begun = {} if own else self._inputs[action.origin].gradients
            self._accumulators[place] = Accumulator(stage.submod.parameters(), mine, own=own, begun=begun)
        return self._accumulators[place].adding(action.microbatch)

    @contextmanager
    def _giving(self, stage: Any, turn: Turn) -> Iterator[None]:
        """Returns the context that collects a microbatch's weight gradients for the sum with those of peers."""
        assert self._sums is not None
        begun = self._inputs[turn.origin].gradients if turn.microbatch == 0 else {}
        accumulator = Accumulator(stage.submod.parameters(), [turn.microbatch], own=False, begun=begun)
        with accumulator.adding(turn.microbatch):
            yield
        self._sums.give(turn, accumulator.gradients)
