"""How stages learn the shapes of what they send and receive, without their peers.

torch's stages agree on shapes by messages (pickled ones) between neighbours in their first step. A replacement has no
neighbour in its first step, so the metadata goes through the job's store as JSON, where it stays
(`swift.runtime.shapes`). One more forward at the start of every process is what it costs.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from swift.runtime import _torch, _torch_versions
from swift.runtime.before import Before
from swift.runtime.channel import BACKWARD, FORWARD, Channel
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.rng import kept

if TYPE_CHECKING:
    _Base = PipelineStage
else:
    # Python lets an object change its class only between classes that grew from the same one.
    _Base = _torch.StageBase


class Inference:
    """(torch runs a stage once more, to learn its shapes) ``Inference(module)`` … ``end()``: as if it had not."""

    def __init__(self, module: torch.nn.Module):
        self._module = Before([module], parameters=True)
        self._module.keep()
        self._modes = [(part, part.training) for part in module.modules()]
        self._randomness = ExitStack()
        self._randomness.enter_context(kept())

    @property
    def changed(self) -> bool:
        """The forward has changed something."""
        return self._module.changed

    def end(self) -> None:
        self._module.put_back()
        for part, training in self._modes:
            part.training = training
        self._randomness.close()


class LearnsShapesAlone(_Base):
    """A stage whose neighbours need not be there when it learns its shapes. Mixed in before the torch class."""

    _channel: Channel
    groups: Sequence[ReconfigurableGroup] = ()
    """Over which a module, DDP or FSDP may communicate in a forward or backward."""
    changes_buffers = False
    """A forward changes its module (running statistics), so that each microbatch needs what the one before has left."""
    inferring: bool
    """The module runs for its shapes only."""
    _before_inference: Inference | None

    def _attach_shapes(self, channel: Channel) -> None:
        self._channel = channel
        self.inferring = False
        self._before_inference = None

    @property
    @abstractmethod
    def call(self) -> int:
        """Which call of the schedule in this step is under way, from 0."""

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        metas = meta.forward_metas if isinstance(meta, _torch.ForwardMeta) else meta.backward_metas
        kind = FORWARD if isinstance(meta, _torch.ForwardMeta) else BACKWARD
        self._channel.shapes.put(kind, self.stage_index, dst_stage, _torch.meta_to_json(metas))

    def _recv_meta(self, src_stage: int) -> Any:
        kind = FORWARD if src_stage < self.stage_index else BACKWARD
        metas = _torch.meta_from_json(self._channel.shapes.get(kind, src_stage, self.stage_index))
        return _torch.ForwardMeta(metas) if kind == FORWARD else _torch.BackwardMeta(metas)

    # Inference runs the module on arbitrary bits, so what it did to it (running statistics, attributes, an encoder that
    # follows another one) is taken back, and what it drew.
    # Other ranks do not take part in it, so the weights that FSDP gathers are arbitrary as well.

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        self.inferring = True
        self._channel.inferring()
        training, first = bool(self.has_backward), self.is_first
        self._channel.shapes.infer(self._channel.step, self.call, training=training, first=first)
        self._before_inference = Inference(self.submod)
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
        """(inference) Past DDP: it would reduce the gradients of this, which its peers may not take part in."""
        if isinstance(module, DistributedDataParallel):
            module = module.module
        return super()._compute_outputs(*args, module=module, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        self._look_at_changes()  # from 2.14 on torch puts buffers back itself
        super()._post_metadata_inference_cleanup()
        self._end_inference()

    def _look_at_changes(self) -> None:
        if self._before_inference is not None:
            self.changes_buffers = self.changes_buffers or self._before_inference.changed

    def _end_inference(self) -> None:
        _torch.reset_sharded(self.submod)
        self._look_at_changes()
        if self._before_inference is not None:
            self._before_inference.end()
        self._before_inference = None
        self.inferring = False

    def give_up_inference(self) -> bool:
        """(a call has failed) True: it had been under way."""
        inferring = self.inferring
        if inferring:
            self._end_inference()
        return inferring


_torch_versions.learn_shapes_alone(LearnsShapesAlone)


@contextmanager
def inferred_whole(schedule: Any) -> Iterator[None]:
    """Around a call. A schedule notes that shapes are known once all of its stages have agreed on them: were it cut
    short before that, buffers would be of training and the note of evaluation, or the other way round."""
    try:
        yield
    except BaseException:
        given_up = [stage.give_up_inference() for stage in _torch.schedule_stages(schedule)]
        if any(given_up):
            _torch.forget_shapes(schedule)
        raise
