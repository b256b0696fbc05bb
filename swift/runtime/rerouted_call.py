"""One call of a schedule in which some ranks are missing: its ranks compute microbatches of other origins among theirs.

torch's schedules give each stage one rank. So the call is carried out here: each rank walks its own list of actions
(`swift.runtime.routes`), sends what it has computed to whoever computes the next part, and keeps the gradients of other
origins apart (`swift.runtime.shared_sums`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from swift.errors import UsageError
from swift.recovery.adaptive import Action
from swift.recovery.adaptive.work import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from swift.runtime import _torch, _torch_calls
from swift.runtime.apart import Accumulator, Gradients
from swift.runtime.before import Before
from swift.runtime.channel import Channel
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.reducer import Contribution, Row, Shares, Whole
from swift.runtime.routes import Routes
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
