"""One call of a schedule in which some ranks are missing: its ranks compute microbatches of other origins among theirs.

torch's schedules give each stage one rank. So the call is carried out here: each rank walks its own list of actions
(`swift.recovery.adaptive`), sends what it has computed to whoever computes the next part, and keeps the gradients of
other origins apart (`swift.runtime.shared_sums`). Every rank works the lists out for itself, from the same numbers.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from swift.errors import UsageError
from swift.recovery import Assignment
from swift.recovery.adaptive import Action, Costs, Work, found_steps, period, plan_step
from swift.recovery.adaptive.work import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from swift.runtime import _torch, _torch_calls
from swift.runtime.apart import Accumulator, Gradients
from swift.runtime.before import Before
from swift.runtime.channel import Channel
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.reducer import Contribution, Row, Shares, Whole
from swift.runtime.shared_sums import SharedSums, Turn
from swift.runtime.tags import COLLECTIVES, REROUTED

_SLOTS = 16
"""Tensors that one stage sends to the next, at most."""
MESSAGES_MAX = (COLLECTIVES - REROUTED) // (2 * _SLOTS)
"""Stages x origins x microbatches, at most."""


class Inputs(NamedTuple):
    """What enters an origin's call of the schedule from outside, at one stage group: by microbatch."""

    args: Sequence[Any]
    kwargs: Sequence[Any]
    targets: Sequence[Any] | None
    loss_kwargs: Mapping[str, Any] | None = None
    gradients: Mapping[torch.nn.Parameter, torch.Tensor] = MappingProxyType({})
    """What is there before the call: zeros, or what the trainer has computed by itself."""


class Routes(NamedTuple):
    """Who computes what in a call."""

    work: Work
    orders: Mapping[int, tuple[Action, ...]]

    def owner(self, stage: int, origin: int, microbatch: int) -> int:
        return self.work.owners[stage, origin][microbatch]

    def microbatches_of(self, slot: int, stage: int, origin: int) -> list[int]:
        """That this rank computes, ascending."""
        return [mb for mb, owner in enumerate(self.work.owners[stage, origin]) if owner == slot]

    def is_shared(self, stage: int, origin: int) -> bool:
        """Several ranks compute the origin's microbatches there."""
        return len(set(self.work.owners[stage, origin])) > 1

    def sharers(self, slot: int, own: int) -> list[int]:
        """The ranks of this one's stages, ascending. `own`: its own origin."""
        stage = self._stages(slot, own)[0]
        return sorted(
            {owner for origin in range(self.work.origins) for owner in self.work.owners[stage, origin]}
        )

    def share_of(self, slot: int, own: int) -> list[Row]:
        """What a rank has gradients of besides those of its own batch: of batches that it has adopted alone, and a part
        of each that its peers have adopted with it."""
        stage, place = self._stages(slot, own)[0], self.sharers(slot, own).index(slot)
        rows = []
        for origin in range(self.work.origins):
            if self.is_shared(stage, origin):
                rows.append(Row(origin, place))
            elif origin != own and slot in self.work.owners[stage, origin]:
                rows.append(Row(origin, 0))
        return rows

    def turns(self, slot: int, own: int) -> list[Turn]:
        """In which the peers of a rank sum what they share: about as they compute it, and each origin's microbatches
        ascending."""
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
        """Of this rank. At each of them it computes the same microbatches."""
        owners = self.work.owners
        return [stage for stage, origin in owners if origin == own and slot in owners[stage, own]]


Seconds = tuple[tuple[float, float, float], ...]
"""By stage: what a microbatch takes in the forward, and in the two parts of the backward (for inputs, for weights). In
any unit."""


def equal_seconds(stages: int) -> Seconds:
    """If nobody has measured anything."""
    return tuple(_in_parts(1.0, 2.0, _weights_share(stage, stages)) for stage in range(stages))


def seconds_of(told: Sequence[torch.Tensor]) -> Seconds:
    """From what ranks have measured: [stages, 3] of each (forward, whole backward, the share of weights in it), with
    nan for what it does not know. The median of those that know, in units of the mean forward. Of equal stages if
    nobody knows what one of them takes."""
    medians = torch.stack(list(told)).nanmedian(dim=0).values
    taken, stages = medians[:, :2], len(medians)
    if not bool(torch.isfinite(taken).all() and (taken > 0).all()):
        return equal_seconds(stages)
    # One rounding, whatever the processor: all ranks plan by the same numbers.
    mean = math.fsum(taken[:, 0].tolist()) / stages
    return tuple(
        _in_parts(
            forward / mean, backward / mean, _weights_share(stage, stages) if math.isnan(share) else share
        )
        for stage, (forward, backward, share) in enumerate(medians.tolist())
    )


def _weights_share(stage: int, stages: int) -> float:
    """Of a backward, if nobody has measured it. Of the first stage it is all: there torch computes the whole backward
    with the weights."""
    return 1.0 if stage == 0 and stages > 1 else 0.5


def _in_parts(forward: float, backward: float, share: float) -> tuple[float, float, float]:
    weights = backward * share
    return forward, backward - weights, weights


def routes_of(
    assignment: Assignment, schedule: Any, *, split: bool, memory: float, seconds: Seconds, staggered: bool
) -> Routes:
    """Of a call of this schedule in this generation; the same at all ranks.

    `split`: backwards are split, also if the schedule's are whole. `memory`: how many times the activations that a rank
    holds in the schedule it may hold, at most. `staggered`: what counts is the time between two steps that overlap.
    """
    stages = _torch.schedule_stages(schedule)
    groups = dict(stages[0].stage_index_to_group_rank)
    microbatches = _torch.schedule_microbatches(schedule)
    owners = []
    for stage, group in sorted(groups.items()):
        for origin in range(assignment.dp_size):
            told = (assignment.owner(group, origin, mb) for mb in range(microbatches))
            owners.append(((stage, origin), tuple(owner for owner in told if owner is not None)))
    held = _torch_calls.activations_held(schedule)
    caps = None if held is None else [math.ceil(count * memory) for count in held]
    cap = (
        None
        if caps is None
        else tuple((slot, caps[assignment.slots[slot].stage_group]) for slot in assignment.occupied)
    )
    split = split or _torch.splits_backward(schedule)
    return _routes(tuple(owners), len(groups), microbatches, split, cap, seconds, staggered)


@lru_cache(maxsize=8)
def _routes(
    owners: tuple[tuple[tuple[int, int], tuple[int, ...]], ...],
    stages: int,
    microbatches: int,
    split: bool,
    cap: tuple[tuple[int, int], ...] | None,
    seconds: Seconds,
    staggered: bool,
) -> Routes:
    work = Work(
        stages=stages,
        origins=len(owners) // stages,
        microbatches=microbatches,
        owners=dict(owners),
        split=split,
        costs=_costs_of(seconds),
        cap=None if cap is None else dict(cap),
    )
    steps = [plan_step(work), *(found_steps(work) if staggered else ())]
    if seconds != equal_seconds(stages):
        # The rules are no exact method: now and then they find more where all stages are alike.
        steps.append(plan_step(replace(work, costs=_costs_of(equal_seconds(stages)))))
    return Routes(work, min(steps, key=lambda step: period(work, step, staggered=staggered)).orders())


def _costs_of(seconds: Seconds) -> Costs:
    forward, inputs, weights = zip(*seconds, strict=True)
    return Costs(forward=forward, backward_input=inputs, backward_weight=weights)


class ReroutedCall:
    """One, at one rank. Trainer's thread.

    ``run()``, and then `shares`: what belongs to other origins. Raises RuntimeError if a peer is lost.
    """

    def __init__(
        self,
        routes: Routes,
        slot: int,
        origin: int,
        channel: Channel,
        world: ReconfigurableGroup,
        *,
        quiet: Callable[[], Any],
        apart: bool,
        not_shared: Callable[[str], UsageError],
    ) -> None:
        """`quiet`: a context in which nobody is shown what passes. `apart`: gradients of other origins are kept so.
        `not_shared`: as `SessionConfig.not_shared`."""
        self._routes = routes
        self._slot = slot
        self._own = origin
        self._channel = channel
        self._world = world
        self._quiet = quiet
        self._not_shared = not_shared
        self._apart = apart
        self._accumulators: dict[tuple[int, int], Accumulator] = {}
        """(stage, origin) -> the gradients of a batch that this rank computes alone."""
        self._sums: SharedSums | None = None
        self._turns: dict[tuple[int, int, int], Turn] = {}
        """(stage, origin, microbatch) -> its turn in `_sums`."""
        self._modules = Before(())
        self._inputs: Mapping[int, Inputs] = {}
        self._sends: list[Any] = []
        self._chunks: dict[tuple[int, int], int] = {}
        """(origin, microbatch) -> the number under which stages keep what they have of it."""
        self._scale = 1
        """What gradients are divided by under the schedule that was called: a trainer may have several."""
        self._losses: dict[tuple[int, int], Any] = {}
        self._outputs: dict[int, Any] = {}
        """Of the last stage, by microbatch of this rank's own."""

    def run(self, schedule: Any, call: dict[str, Any], inputs: Mapping[int, Inputs]) -> None:
        """`call`: the arguments of this rank's own call, by name; `inputs`: of other origins."""
        routes, count = self._routes, self._routes.work.microbatches
        self._scale = _torch.schedule_grad_scale(schedule)
        _torch_calls.initialize_stages(schedule, call)
        stages = {stage.stage_index: stage for stage in _torch.schedule_stages(schedule)}
        self._modules = Before(stage.submod for stage in stages.values())
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
        _torch_calls.give_losses(schedule, own, call)
        for stage in stages.values():
            if stage.is_last:
                stage.output_chunks[:] = [self._outputs[mb] for mb in sorted(self._outputs)]
            stage.perform_reduce_grad(self._scale)

    def computed(self, origin: int) -> list[int]:
        """The microbatches of another origin that this rank computes, ascending."""
        orders = self._routes.orders.get(self._slot, ())
        return sorted({action.microbatch for action in orders if action.origin == origin})

    def shares(self, slots: Sequence[int], origins: Sequence[int]) -> Shares:
        """`slots`, `origins`: of the ranks of the data group, by their places. After `run`."""
        rows = [
            [Row(origin), *self._routes.share_of(slot, origin)]
            for slot, origin in zip(slots, origins, strict=True)
        ]
        place = slots.index(self._slot)
        return Shares(rows, place, self.contributions(rows[place][1:]), self._scale)

    def contributions(self, rows: Sequence[Row]) -> list[Contribution]:
        """What this rank has in each of its rows."""
        return [self._contribution(row.origin) for row in rows]

    @property
    def bytes_max(self) -> int:
        """Of other origins' gradients, that this rank held at a time."""
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
            self._world.part(sharers),
            sharers.index(self._slot),
            len(sharers),
            turns,
            {index: list(stage.submod.parameters()) for index, stage in stages.items()},
        )

    def _contribution(self, origin: int) -> Contribution:
        if self._sums is not None and any(turn.origin == origin for turn in self._turns.values()):
            return self._sums.part(origin)
        whole: Gradients = {}
        for (_, of), accumulator in self._accumulators.items():
            if of == origin:
                whole |= accumulator.gradients
        return Whole(whole)

    @contextmanager
    def _with_chunks(self, stages: Collection[Any], order: Iterable[Action]) -> Iterator[None]:
        """In here each stage has room for what it has of each microbatch. Numbers of other schedules stay theirs."""
        others = sorted({(a.origin, a.microbatch) for a in order if a.origin != self._own})
        first = max(_torch_calls.free_chunk(stage) for stage in stages)
        self._chunks = {each: number for number, each in enumerate(others, first)}
        adopted = {number: microbatch for (_, microbatch), number in self._chunks.items()}
        with ExitStack() as stack:
            for stage in stages:
                stack.enter_context(_torch_calls.more_chunks(stage, adopted))
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
        # What a forward changes in its modules (buffers, counters) is the origin's own, whose rank is not there.
        self._modules.keep()
        self._modules.lend()
        try:
            with self._quiet(), self._channel.as_origin(origin):
                yield
        finally:
            self._modules.put_back()

    def _tag(self, backward: bool, source: int, action: Action, position: int) -> int:
        work = self._routes.work
        number = (int(backward) * work.stages + source) * work.origins + action.origin
        tag = REROUTED + (number * work.microbatches + action.microbatch) * _SLOTS + position
        if position >= _SLOTS:
            raise self._not_shared(
                f"and a stage that sends {position + 1} tensors: at most {_SLOTS} are told apart"
            )
        return tag

    def _receive(self, stage: Any, action: Action) -> list[Any]:
        """What the action needs of another rank, under way."""
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
            self._world.recv([buffer.detach()], whose, self._tag(not forward, source, action, position))
            for position, buffer in enumerate(buffers)
        ]

    def _send(self, stage: Any, action: Action, to_stage: int, ops: Sequence[Any]) -> None:
        to = self._routes.owner(to_stage, action.origin, action.microbatch)
        backward = action.kind != FORWARD
        for position, op in enumerate(ops):
            tag = self._tag(backward, stage.stage_index, action, position)
            self._sends.append(self._world.send([op.tensor.detach().contiguous()], to, tag))

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
                loss = _torch_calls.compute_loss(schedule, output, of.targets[mb], of.loss_kwargs)
                if loss is not None:
                    self._losses[action.origin, mb] = loss
            return
        behind = stages.get(action.stage + 1)
        if behind is not None and self._is_mine(action.stage + 1, action):
            behind.set_local_fwd_input(output, chunk)
        else:
            self._send(stage, action, action.stage + 1, stage.get_fwd_send_ops(chunk))

    def _is_mine(self, stage: int, action: Action) -> bool:
        return self._routes.owner(stage, action.origin, action.microbatch) == self._slot

    def _into(self, stage: Any, action: Action) -> AbstractContextManager[None]:
        """Where gradients of weights of this microbatch go."""
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
        """Around what computes the gradients of a microbatch that is summed with those of peers."""
        assert self._sums is not None
        begun = self._inputs[turn.origin].gradients if turn.microbatch == 0 else {}
        accumulator = Accumulator(stage.submod.parameters(), [turn.microbatch], own=False, begun=begun)
        with accumulator.adding(turn.microbatch):
            yield
        self._sums.give(turn, accumulator.gradients)
