"""Pipeline stages that log what crosses their boundaries.

The seam is torch's own: every schedule asks a stage for its send and receive operations per microbatch and
calls its compute methods. The stages here answer as torch's do, and tell the session's `Channel` what is sent;
in a replay the channel takes the place of the transport, and no operation is returned.

Legend: `stage` index in the pipeline, `mb` the schedule's microbatch index.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from swift.errors import ReplayRefused, UsageError
from swift.runtime import _torch, _torch_versions
from swift.runtime.channel import BACKWARD, FORWARD, Channel
from swift.runtime.profiling import WEIGHTS
from swift.runtime.shape_inference import LearnsShapesAlone
from swift.runtime.updates import Updates

# Several destinations of one stage keep apart: slot = destination * _SLOTS + position among its tensors.
_SLOTS = 256


class Share(Protocol):
    """(a replay that others help with) What of a step this rank computes."""

    def begin(self, stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any], saves_output: bool) -> None:
        """A forward of a stage is asked for, with these external inputs; a step begins with the first of them."""

    def begun(self, stage: Any) -> bool:
        """It is known who computes what of the call of the schedule that is under way."""

    def skips(self, mb: int) -> bool:
        """Somebody else computes it."""

    def loss(self, mb: int) -> torch.Tensor:
        """Of a microbatch that is skipped; it has its value from `combine` on."""

    def weighing(self) -> AbstractContextManager[None]:
        """Around the second part of a split backward, which adds to gradients without telling autograd's hooks."""

    def combine(self, stage: Any, scale: int) -> Sequence[tuple[Any, int]]:
        """All microbatches of the stage that are this rank's are computed, and its gradients to be divided by `scale`.
        Behind the rank's last stage all gradients become those of all microbatches. The stages, each with its scale,
        of which that is so now."""


class _Logged(LearnsShapesAlone):
    """What a logged stage does differently from torch's. Mixed in before the torch class."""

    _calls: int
    _awaiting_forward: set[int]
    _awaiting_backward: set[int]
    _updates: Updates
    last_backward: bool
    grad_scale: int
    """What gradients are divided by under the schedule that runs."""
    share: Share | None = None
    """While others help with a replay."""
    loss_like: Any = None
    """(last stage) What the loss function returns."""
    adopted: Mapping[int, int] = MappingProxyType({})
    """Number -> microbatch of another origin, where this stage computes some (`swift.runtime.rerouting`)."""
    skipped: int | None = None
    """The microbatch whose forward was asked for last, if it is not computed here."""
    _withheld: dict[int, list[dist.P2POp]]
    """Receives of microbatches that may turn out to be computed elsewhere, until the step's first forward begins."""
    _arriving: dict[int, list[dist.Work]]
    """What was withheld, and is under way."""

    def _attach(self, channel: Channel, updates: Updates) -> None:
        self._attach_shapes(channel)
        self._updates = updates
        self.last_backward = False
        self.grad_scale = 1
        self._calls = -1
        self._awaiting_forward = set()
        self._awaiting_backward = set()
        self._withheld, self._arriving = {}, {}

    # --- one call of schedule.step() ---

    def clear_runtime_states(self) -> None:
        """Every schedule calls this first in a step: the calls are counted, so that keys stay apart when a
        trainer runs its schedule several times in one optimizer step (accumulation, evaluation)."""
        self._channel.settle()  # receive buffers are used again
        self._calls += 1
        self._awaiting_forward.clear()
        self._awaiting_backward.clear()
        self._withheld.clear()
        self._arriving.clear()
        super().clear_runtime_states()

    def begin_step(self) -> None:
        self._calls = -1

    @property
    def call(self) -> int:
        """Which call of the schedule in this step is under way, from 0."""
        return max(self._calls, 0)

    def _microbatch(self, mb: int) -> int:
        return self.call * 65536 + self.adopted.get(mb, mb)

    # --- sends and receives ---

    # In a replay a buffer is filled when it is computed with, not when its receive is posted: schedules post
    # receives ahead of sends that the other side, replaying too, may wait for. Inside a recovery group, whose stages
    # replay together, nothing is logged: there the operations are torch's as ever.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self._skips(fwd_chunk_id):
            return []
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        live = self._received(ops, self.args_recv_info, self._awaiting_forward, fwd_chunk_id)
        if self.share is None or self.share.begun(self):
            return live
        self._withheld[fwd_chunk_id] = live  # it is not known yet whether it is computed here
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self._skips(bwd_chunk_id):
            return []
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        return self._received(ops, self.grad_recv_info, self._awaiting_backward, bwd_chunk_id)

    def _received(self, ops: list[dist.P2POp], infos: Any, awaiting: set[int], mb: int) -> list[dist.P2POp]:
        if not ops or not self._channel.replaying:
            return ops
        pairs = list(zip(_arriving(infos[mb]), ops, strict=True))
        live = [op for info, op in pairs if not self._from_log(info.source, self.stage_index)]
        if len(live) < len(pairs):
            awaiting.add(mb)
        return live

    def _receive_withheld(self, mb: int) -> None:
        """The step's first forward begins: all of them are posted, in their order; this microbatch is waited for."""
        withheld = [(other, ops) for other, ops in self._withheld.items() if not self._skips(other)]
        for other in self._withheld:
            if self._skips(other):
                _torch_versions.forget_receives(self.args_recv_info[other])
        self._withheld.clear()
        self._arriving |= {other: _torch.started(ops) for other, ops in withheld}
        for work in self._arriving.pop(mb, ()):
            work.wait()

    def _from_log(self, source: int, destination: int) -> bool:
        """In a replay."""
        return self._channel.groups.crosses(source, destination)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self._skips(fwd_chunk_id):
            return []
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        sent = [
            (stage, output)
            for output in range(len(self.act_send_info))
            for stage in self.act_send_info[output]
            if stage is not None
        ]
        destinations = [stage for stage, _ in sent]
        for op, (_, output) in zip(ops, sent, strict=True):
            self._check_shape(op.tensor, output)
        return self._sent(FORWARD, fwd_chunk_id, destinations, ops)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self._skips(bwd_chunk_id):
            return []
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        destinations = [
            stage
            for index, stage in enumerate(self.grad_send_info or ())
            if stage is not None and _torch_versions.sends_gradient(self, index)
        ]
        return self._sent(BACKWARD, bwd_chunk_id, destinations if ops else [], ops)

    def _check_shape(self, tensor: torch.Tensor, output: int) -> None:
        """A message that is larger than its buffer may end the neighbour's process."""
        metas = self._stage_meta.outputs
        if metas is None or metas[output] is None or metas[output].shape == tensor.shape:
            return
        raise UsageError(
            f"stage {self.stage_index} sends {list(tensor.shape)} in step {self._channel.step}, and its neighbour "
            f"expects {list(metas[output].shape)}: torch's schedules learn shapes where they turn from training to "
            "evaluation or back, so batches are of one size; pad the odd one, or split it over several calls"
        )

    def streams_read(self) -> list[str]:
        """(replay) What it receives out of the log."""
        beside = ((self.stage_index - 1, FORWARD), (self.stage_index + 1, BACKWARD))
        return [
            self._channel.stream(source, direction)
            for source, direction in beside
            if 0 <= source < self.num_stages and self._from_log(source, self.stage_index)
        ]

    def _sent(
        self, direction: str, mb: int, destinations: list[int], ops: list[dist.P2POp]
    ) -> list[dist.P2POp]:
        live = []
        for destination, slot, op in zip(destinations, _slots(destinations), ops, strict=True):
            self._channel.profile.sent(self.stage_index, destination, op.tensor.nbytes)
            if self._channel.logs(self.stage_index, destination):
                self._channel.sent(self.stage_index, direction, self._microbatch(mb), slot, op.tensor)
            if not self._from_log(self.stage_index, destination):
                live.append(op)
        return live if self._channel.replaying else ops

    def _fill(self, infos: tuple[Any, ...], direction: str, mb: int) -> None:
        positions: dict[int, int] = {}
        for info in _arriving(infos):
            if not self._from_log(info.source, self.stage_index):
                continue
            position = positions.get(info.source, 0)
            positions[info.source] = position + 1
            slot = self.stage_index * _SLOTS + position
            self._channel.receive(info.source, direction, self._microbatch(mb), slot, info.buffer)

    # --- compute ---

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        mb = self._microbatch(fwd_chunk_id)
        if self.share is not None:
            self.share.begin(self, args, kwargs or {}, save_forward_output)
        self.skipped = fwd_chunk_id if self._skips(fwd_chunk_id) else None
        self._receive_withheld(fwd_chunk_id)
        if fwd_chunk_id in self._awaiting_forward and self.skipped is None:
            self._awaiting_forward.discard(fwd_chunk_id)
            self._fill(self.args_recv_info[fwd_chunk_id], FORWARD, fwd_chunk_id)
        external = [*(args if self.is_first else ()), *(kwargs or {}).values()]
        self._channel.entered(self.stage_index, mb, [t for t in external if isinstance(t, torch.Tensor)])
        if self.skipped is not None:
            return None
        with self._channel.computing(self.stage_index, FORWARD, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._channel.computed(FORWARD, fwd_chunk_id)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        if self._skips(bwd_chunk_id):
            return None
        if bwd_chunk_id in self._awaiting_backward:
            self._awaiting_backward.discard(bwd_chunk_id)
            self._fill(self.grad_recv_info[bwd_chunk_id], BACKWARD, bwd_chunk_id)
        self.last_backward = last_backward
        self._channel.randomness.backward(self.stage_index, self._microbatch(bwd_chunk_id))
        with self._channel.computing(self.stage_index, BACKWARD, bwd_chunk_id):
            result = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.last_backward = False
        self._channel.computed(BACKWARD, bwd_chunk_id)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """(schedules that compute gradients of weights apart)"""
        if self._skips(bwd_chunk_id):
            return
        self._channel.randomness.weights(self.stage_index, self._microbatch(bwd_chunk_id))
        weighing = nullcontext() if self.share is None else self.share.weighing()
        with self._channel.computing(self.stage_index, WEIGHTS), weighing:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._channel.computed(WEIGHTS, bwd_chunk_id)

    def _skips(self, mb: int) -> bool:
        return self.share is not None and self.share.skips(mb)

    # Two adjacent stages of a rank (the turn of a V) hand each other tensors; a skipped microbatch has none.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if not self._skips(mb_index):
            super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        if self._skips(mb_index):
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self._skips(mb_index):
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Schedules call this when they have computed everything of the stage."""
        share, complete = self.share, [(self, grad_scale_factor)]
        for stage, scale in complete if share is None else share.combine(self, grad_scale_factor):
            stage._reduce(scale)

    def _reduce(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Schedules call this once all gradients of the stage are complete."""
        if self._updates.wait_free:
            self._updates.stage_ready(self)  # what is applied already was scaled before it was reduced
        else:
            super().scale_grads(grad_scale_factor)


def _arriving(infos: tuple[Any, ...]) -> list[Any]:
    """Of a microbatch, what another stage sends; torch has a receive operation for each."""
    return [info for info in infos if not info.is_root_arg and info.buffer is not None]


def _slots(destinations: list[int]) -> Iterator[int]:
    positions: dict[int, int] = {}
    for destination in destinations:
        position = positions.get(destination, 0)
        positions[destination] = position + 1
        yield destination * _SLOTS + position


class LoggedPipelineStage(_Logged, PipelineStage):
    """`torch.distributed.pipelining.PipelineStage`, logged."""


class LoggedTracedStage(_Logged, _torch.TracedStage):
    """A stage that `torch.distributed.pipelining.pipeline()` built, logged."""


def adopt(stage: Any, channel: Channel, updates: Updates) -> Any:
    """Turns a stage that exists already into a logged one. The object stays the same, its class changes. Raises
    UsageError for one that is logged already, and for another kind of object."""
    if isinstance(stage, _Logged):
        raise UsageError(f"stage {stage.stage_index} is logged already; adopt it once")
    if type(stage) is PipelineStage:
        stage.__class__ = LoggedPipelineStage
    elif type(stage) is _torch.TracedStage:
        stage.__class__ = LoggedTracedStage
    else:
        raise UsageError(
            f"a {type(stage).__name__} cannot be adopted; give a stage of torch.distributed.pipelining"
        )
    stage._attach(channel, updates)
    return stage


def logged_loss(stages: list[Any], channel: Channel) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper for a schedule's loss function that records the targets of the last stage."""
    last = next((stage for stage in stages if stage.is_last), None)

    def wrapper(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        def loss(output: Any, target: Any, **kwargs: Any) -> Any:
            if last is not None and not last.inferring and isinstance(target, torch.Tensor):
                channel.targeted(last.stage_index, target)
            if last is not None and last.skipped is not None:
                if kwargs:
                    raise ReplayRefused("the loss function takes loss_kwargs, which helpers do not have")
                return last.share.loss(last.skipped)
            result = loss_fn(output, target, **kwargs)
            if last is not None and isinstance(result, torch.Tensor):
                if last.inferring:
                    last.loss_like = result.detach()
                else:
                    channel.lost(last.stage_index, result)
            return result

        loss.__wrapped__ = loss_fn  # type: ignore[attr-defined]
        return loss

    return wrapper
