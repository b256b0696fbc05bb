"""Pipeline stages that log the tensors that cross their boundaries.

The interface is torch's own: every schedule asks a stage for its send and receive operations per microbatch and calls
its compute methods. The stages here answer as torch's do, and report sent tensors to the session's `Channel`. In a
replay the channel takes the place of the transport, and no operation is returned.

Legend: `stage` index in the pipeline, `mb` the schedule's microbatch index.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from swift_ft import torch_private
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import ReplayRefused, UsageError
from swift_ft.state import fsdp
from swift_ft.state.digests import digest_of
from swift_ft.state.module_state import KeptModules
from swift_ft.state.rng import kept
from swift_ft.train.boundary_log import Channel
from swift_ft.train.profiling import BACKWARD, FORWARD, WEIGHTS
from swift_ft.train.updates import Updates

# Shape exchange that does not need the peers to be present.
#
# torch's stages agree on shapes by (pickled) messages between neighbours in their first step. A replacement has no
# neighbour in its first step, so the metadata goes through the job's store as JSON, where it stays
# (`swift_ft.train.boundary_log`). The cost is one more forward at the start of every process.

if TYPE_CHECKING:
    from swift_ft.train.shared_replay import Owner

    _Base = PipelineStage
else:
    # Python lets an object change its class only between classes with a common base of the same layout.
    _Base = torch_private.StageBase


class Inference:
    """Undoes torch's extra run of a stage, which learns its shapes and calls its loss function: ``Inference(module)`` …
    ``end()``."""

    def __init__(
        self,
        module: torch.nn.Module,
        losses: Iterable[Any] = (),
        objects: Mapping[str, Any] = MappingProxyType({}),
    ):
        """`losses`: loss functions. `objects`: the registered objects, which a forward or a loss may call."""
        self._module = KeptModules([module], parameters=True)
        self._module.keep()
        self._modes = [(part, part.training) for part in module.modules()]
        self._others = ExitStack()
        self._others.enter_context(kept())
        beside = [each for each in (*losses, *objects.values()) if isinstance(each, torch.nn.Module)]
        modules = KeptModules(beside, parameters=True)
        modules.keep()
        self._others.callback(modules.restore)
        self._others.enter_context(_objects_kept(objects))

    @property
    def changed(self) -> bool:
        return self._module.changed

    def end(self) -> None:
        self._module.restore()
        for part, training in self._modes:
            part.training = training
        self._others.close()


@contextmanager
def _objects_kept(objects: Mapping[str, Any]) -> Iterator[None]:
    asked = {
        name: each
        for name, each in objects.items()
        if not (isinstance(each, torch.nn.Module) or _gives_data(each))
    }
    states = {name: copy.deepcopy(each.state_dict()) for name, each in asked.items()}
    try:
        yield
    finally:
        for name, each in asked.items():
            if _digest(each.state_dict()) != _digest(states[name]):
                each.load_state_dict(states[name])


def _gives_data(thing: Any) -> bool:
    return hasattr(type(thing), "__next__") or hasattr(type(thing), "__iter__")


def _digest(state: Any) -> bytes:
    return digest_of(fsdp.localized({"": state})[0])


@contextmanager
def inferred_whole(schedule: Any) -> Iterator[None]:
    """Wraps a call of the schedule. If it fails in an inference, the schedule forgets its shapes. A schedule records
    that shapes are known once all of its stages have agreed on them; after a failure before that, buffers could be
    those of training and the record that of evaluation, or the other way round."""
    try:
        yield
    except BaseException:
        given_up = [stage.give_up_inference() for stage in torch_private.schedule_stages(schedule)]
        if any(given_up):
            torch_private.forget_shapes(schedule)
        raise


# Slots per destination, so that several destinations of a stage differ: slot = destination * _SLOTS + tensor position.
_SLOTS = 256


class _Logged(_Base):
    """The differences of a logged stage from torch's. Mixed in before the torch class. Its neighbours need not be
    present when it learns its shapes."""

    _channel: Channel
    groups: Sequence[ReconfigurableGroup] = ()
    """Groups over which a module, DDP or FSDP may communicate in a forward or backward."""
    changes_buffers = False
    """True if a forward changes its module (running statistics), so that each microbatch depends on the one before."""
    inferring: bool
    """True while the module runs for its shapes only."""
    called_too: Callable[[], tuple[Iterable[Any], Mapping[str, Any]]]
    """Returns the loss functions and registered objects, which a forward may change too."""
    _before_inference: Inference | None
    _calls: int
    _awaiting_forward: set[int]
    _awaiting_backward: set[int]
    _updates: Updates
    last_backward: bool
    grad_scale: int
    """Divisor of gradients under the running schedule."""
    share: "Owner | None" = None
    """Set while others help with a replay: the part of a step that this rank computes."""
    loss_like: Any = None
    """(last stage) Result of the loss function in the inference."""
    adopted: Mapping[int, int] = MappingProxyType({})
    """Microbatch number -> number in keys, for another origin's microbatches computed here
    (`swift_ft.train.rerouting`)."""
    skipped: int | None = None
    """Microbatch of the last requested forward, if it is not computed here."""

    def _attach(self, channel: Channel, updates: Updates) -> None:
        self._channel = channel
        self.called_too = lambda: ((), {})
        self.inferring = False
        self._before_inference = None
        self._updates = updates
        self.last_backward = False
        self.grad_scale = 1
        self._calls = -1
        self._awaiting_forward = set()
        self._awaiting_backward = set()

    # --- one call of schedule.step() ---

    def clear_runtime_states(self) -> None:
        """Counts the calls, so that keys differ when a trainer runs its schedule several times in one optimizer step
        (accumulation, evaluation). Every schedule calls this first in a call."""
        self._channel.wait_copied()  # receive buffers are reused
        self._calls += 1
        self._awaiting_forward.clear()
        self._awaiting_backward.clear()
        super().clear_runtime_states()

    def begin_step(self) -> None:
        self._calls = -1

    @property
    def call(self) -> int:
        """Number of the schedule's current call in this step, from 0."""
        return max(self._calls, 0)

    def _microbatch(self, mb: int) -> int:
        return self.call * 65536 + self.adopted.get(mb, mb)

    # --- shapes ---

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        metas = meta.forward_metas if isinstance(meta, torch_private.ForwardMeta) else meta.backward_metas
        kind = FORWARD if isinstance(meta, torch_private.ForwardMeta) else BACKWARD
        self._channel.shapes.put(kind, self.stage_index, dst_stage, torch_private.meta_to_json(metas))

    def _recv_meta(self, src_stage: int) -> Any:
        kind = FORWARD if src_stage < self.stage_index else BACKWARD
        metas = torch_private.meta_from_json(self._channel.shapes.get(kind, src_stage, self.stage_index))
        return torch_private.ForwardMeta(metas) if kind == FORWARD else torch_private.BackwardMeta(metas)

    # Inference runs the module on arbitrary bits. So its effects on the module (running statistics, attributes, an
    # encoder that follows another one) and its random draws are undone. Other ranks do not take part in it, so the
    # weights that FSDP gathers are arbitrary too.

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        self.inferring = True
        self._channel.faults.at("shapes", self._channel.step)
        training, first = bool(self.has_backward), self.is_first
        self._channel.shapes.infer(self._channel.step, self.call, training=training, first=first)
        self._before_inference = Inference(self.submod, *self.called_too())
        with self._alone():
            return super()._forward_metadata_inference(*args, **kwargs)

    def _backward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with self._alone():
            return super()._backward_metadata_inference(*args, **kwargs)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.quiet())
            yield

    def _compute_outputs(self, *args: Any, module: torch.nn.Module, **kwargs: Any) -> Any:
        """(inference) Bypasses DDP, which would reduce these gradients; its peers may not take part."""
        if isinstance(module, DistributedDataParallel):
            module = module.module
        return super()._compute_outputs(*args, module=module, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        self._look_at_changes()  # from 2.14 on torch restores buffers itself
        super()._post_metadata_inference_cleanup()
        self._end_inference()

    def _look_at_changes(self) -> None:
        if self._before_inference is not None:
            self.changes_buffers = self.changes_buffers or self._before_inference.changed

    def _end_inference(self) -> None:
        torch_private.reset_sharded(self.submod)
        self._look_at_changes()
        if self._before_inference is not None:
            self._before_inference.end()
        self._before_inference = None
        self.inferring = False

    def give_up_inference(self) -> bool:
        """(a call has failed) Ends an inference that was under way, and returns whether there was one."""
        inferring = self.inferring
        if inferring:
            self._end_inference()
        return inferring

    # --- sends and receives ---

    # In a replay a buffer is filled when the computation needs it, not when its receive is posted: schedules post
    # receives ahead of sends that the other side, replaying too, may wait for. Inside a recovery group, whose stages
    # replay together, nothing is logged: there the operations are torch's own.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self._skips(fwd_chunk_id):
            return []
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        return self._received(ops, self.args_recv_info, self._awaiting_forward, fwd_chunk_id)

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

    def _from_log(self, source: int, destination: int) -> bool:
        """(in a replay) Returns whether messages between these stages come from the log."""
        return self._channel.rehearsed or self._channel.groups.crosses(source, destination)

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
            if stage is not None and torch_private.sends_gradient(self, index)
        ]
        return self._sent(BACKWARD, bwd_chunk_id, destinations if ops else [], ops)

    def _check_shape(self, tensor: torch.Tensor, output: int) -> None:
        """Raises UsageError for another shape: a message larger than its buffer may end the neighbour's process."""
        metas = self._stage_meta.outputs
        if metas is None or metas[output] is None or metas[output].shape == tensor.shape:
            return
        raise UsageError(
            f"stage {self.stage_index} sends {list(tensor.shape)} in step {self._channel.step}, and its neighbour "
            f"expects {list(metas[output].shape)}: torch's schedules learn shapes where they turn from training to "
            "evaluation or back, so batches are of one size; pad the odd one, or split it over several calls"
        )

    def streams_read(self) -> list[str]:
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
        for destination, position, op in zip(destinations, _positions(destinations), ops, strict=True):
            slot = destination * _SLOTS + position
            self._channel.profile.sent(self.stage_index, destination, op.tensor.nbytes)
            self._channel.sends(self.stage_index, direction, self._microbatch(mb), slot, op.tensor)
            launched = self._channel.replaying and self._from_log(self.stage_index, destination)
            if self._channel.groups.crosses(self.stage_index, destination):
                self._channel.sent(
                    self.stage_index, direction, self._microbatch(mb), slot, op.tensor, launched=launched
                )
            if not launched:
                live.append(op)
        return live

    def _fill(self, infos: tuple[Any, ...], direction: str, mb: int) -> None:
        for slot, info in self._by_slot(infos):
            if self._channel.groups.crosses(info.source, self.stage_index):
                early = torch_private.keeps_buffer(info)
                self._channel.receive(
                    info.source, direction, self._microbatch(mb), slot, info.buffer, early=early
                )
            elif self._channel.rehearsed:
                self._channel.receive_inside(info.source, direction, self._microbatch(mb), slot, info.buffer)

    def _received_inside(self, infos: tuple[Any, ...], direction: str, mb: int) -> None:
        """Reports a microbatch's received tensors that are in no log stream."""
        for slot, info in self._by_slot(infos):
            if not self._channel.groups.crosses(info.source, self.stage_index):
                self._channel.received(info.source, direction, self._microbatch(mb), slot, info.buffer)

    def _by_slot(self, infos: tuple[Any, ...]) -> Iterator[tuple[int, Any]]:
        arriving = _arriving(infos)
        for position, info in zip(_positions(info.source for info in arriving), arriving, strict=True):
            yield self.stage_index * _SLOTS + position, info

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
        if self.skipped is not None:  # its receive may have been asked for before that was known
            torch_private.forget_receives(self.args_recv_info[fwd_chunk_id])
        elif fwd_chunk_id in self._awaiting_forward:
            self._awaiting_forward.discard(fwd_chunk_id)
            self._fill(self.args_recv_info[fwd_chunk_id], FORWARD, fwd_chunk_id)
        elif not self.is_first:
            self._received_inside(self.args_recv_info[fwd_chunk_id], FORWARD, fwd_chunk_id)
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
        elif self.has_backward and not self.is_last:
            self._received_inside(self.grad_recv_info[bwd_chunk_id], BACKWARD, bwd_chunk_id)
        self.last_backward = last_backward
        self._channel.randomness.backward(self.stage_index, self._microbatch(bwd_chunk_id))
        with self._channel.computing(self.stage_index, BACKWARD, bwd_chunk_id):
            result = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.last_backward = False
        self._channel.computed(BACKWARD, bwd_chunk_id)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self._skips(bwd_chunk_id):
            return
        self._channel.randomness.weights(self.stage_index, self._microbatch(bwd_chunk_id))
        weighing = nullcontext() if self.share is None else self.share.weighing()
        with self._channel.computing(self.stage_index, WEIGHTS), weighing:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._channel.computed(WEIGHTS, bwd_chunk_id)

    def _skips(self, mb: int) -> bool:
        return self.share is not None and self.share.skips(mb)

    # Two adjacent stages of a rank (the turn of a V) pass each other tensors directly; a skipped microbatch has none.

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
        """Reduces the stage's gradients. Schedules call this once they have computed everything of the stage."""
        share, complete = self.share, [(self, grad_scale_factor)]
        for stage, scale in complete if share is None else share.combine(self, grad_scale_factor):
            stage._reduce(scale)

    def _reduce(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Scales the gradients. Schedules call this once all gradients of the stage are complete."""
        if self._updates.wait_free:
            self._updates.stage_ready(self)  # applied gradients were scaled before they were reduced
        else:
            super().scale_grads(grad_scale_factor)


torch_private.learn_shapes_alone(_Logged)


def _arriving(infos: tuple[Any, ...]) -> list[Any]:
    """Returns a microbatch's tensors that another stage sends; torch has a receive operation for each."""
    return [info for info in infos if not info.is_root_arg and info.buffer is not None]


def _positions(others: Iterable[int]) -> Iterator[int]:
    """Yields how many tensors came before each that go to, or come from, the same other stage."""
    seen: Counter[int] = Counter()
    for other in others:
        yield seen[other]
        seen[other] += 1


class LoggedPipelineStage(_Logged, PipelineStage):
    """`torch.distributed.pipelining.PipelineStage`, logged."""


class LoggedTracedStage(_Logged, torch_private.TracedStage):
    """A stage that `torch.distributed.pipelining.pipeline()` built, logged."""


def adopt(stage: Any, channel: Channel, updates: Updates) -> Any:
    """Turns an existing stage into a logged one. The object stays the same, its class changes. Raises UsageError for a
    stage that is logged already, and for another kind of object."""
    if isinstance(stage, _Logged):
        raise UsageError(f"stage {stage.stage_index} is logged already; adopt it once")
    if type(stage) is PipelineStage:
        stage.__class__ = LoggedPipelineStage
    elif type(stage) is torch_private.TracedStage:
        stage.__class__ = LoggedTracedStage
    else:
        raise UsageError(
            f"a {type(stage).__name__} cannot be adopted; give a stage of torch.distributed.pipelining"
        )
    stage._attach(channel, updates)
    return stage


def logged_loss(stages: list[Any], channel: Channel) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a wrapper for a schedule's loss function that records the targets of the last stage."""
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
