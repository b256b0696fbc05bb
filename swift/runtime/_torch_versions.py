"""What differs between the versions of torch that swift works with (docs/compatibility.md).

Each function asks for what is there, never for a version: a torch that changes again is refused at import with the name
that it lacks, or goes on to work.
"""

from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import _utils, schedules

_SETTLING = ("_initialize_pipeline_distributed_state", "_warmup_p2p")
SETTLE = next((name for name in _SETTLING if hasattr(schedules._PipelineSchedule, name)), _SETTLING[0])
"""The method of a schedule in which its stages settle with their peers how they learn shapes: from 2.15 on, before."""

RESETS_SHARDED = hasattr(FSDPModule, "reset_iter_state")
"""FSDP2 modules can be taken back out of the middle of a step: from 2.13 on. Without it `session.mesh` is refused."""

GATHERED = ("unshard_ops", "unsharded_stages", "_deferred_stages", "_finalized_stages")
"""Where a looped schedule notes which stages are gathered (FSDP2). The last two: from 2.15 on."""


def learn_shapes_alone(kind: type[Any]) -> None:
    """Under every schedule, stages of this class learn their shapes without peers, which a replacement does not have.

    By running: what a trainer has said of shapes is compared with it.
    """
    schedule: Any = schedules._PipelineSchedule
    settle = getattr(schedule, SETTLE)

    def alone(self: Any, stages: list[Any], *args: Any, **kwargs: Any) -> None:
        if not all(isinstance(stage, kind) for stage in stages):
            settle(self, stages, *args, **kwargs)
            return
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.DYNAMIC

    setattr(schedule, SETTLE, alone)


def sends_gradient(stage: Any, index: int) -> bool:
    """Of its input at this place. Up to 2.12: of each that another stage sends."""
    return not hasattr(stage, "_get_grad_send_meta") or stage._get_grad_send_meta(index) is not None


def forget_receives(infos: Sequence[Any]) -> None:
    """Of a microbatch: buffers that nothing will be computed with. From 2.15 on each receive has one of its own, and
    refuses a second one; before, a buffer is the microbatch's for good."""
    for info in infos:
        if hasattr(info, "take_buffer"):
            info.buffer = None


def forget_reduction(stage: Any) -> None:
    """One of FSDP2's that a step was cut short in. From 2.15 on the stage would wait for it."""
    if hasattr(stage, "_gradient_reduction_handle"):
        stage._gradient_reduction_handle = None


def forget_accumulated(parameter: Any) -> None:
    """(FSDP2) Gradients of microbatches that were not reduced yet. From 2.15 on they are the unsharded parameter's."""
    if hasattr(parameter, "accumulate_unsharded_grad_if_needed"):
        parameter.unsharded_accumulated_grad = None
