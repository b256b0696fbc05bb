"""Every private name of torch that swift touches, in one place.

Checked at import: a torch that lacks one of them is refused with the names that are missing, instead of an
AttributeError in the middle of a run. Proven with torch 2.13 on CPU with gloo.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.pipelining import PipelineStage, _utils
from torch.distributed.pipelining import schedules as _schedules
from torch.distributed.pipelining import stage as _stage

from swift.errors import ServiceError

_NEEDED = {
    "torch.distributed.distributed_c10d": (_c10d, ("_set_pg_timeout",)),
    "torch.distributed.pipelining.stage": (
        _stage,
        ("_PipelineStage", "_PipelineStageBase"),
    ),
    "torch.distributed.pipelining._utils": (
        _utils,
        ("_TensorMeta", "_StageForwardMeta", "_StageBackwardMeta"),
    ),
    "torch.distributed.pipelining.schedules": (_schedules, ("_PipelineSchedule",)),
    "torch.distributed.pipelining.stage.PipelineStage": (
        PipelineStage,
        (
            "_recv_meta",
            "_send_meta",
            "_warmup_forward_vote",
            "_warmup_backward_result",
            "_forward_metadata_inference",
            "_post_metadata_inference_cleanup",
            "_get_init_p2p_neighbors_ops",
            "_get_grad_send_meta",
            "get_fwd_recv_ops",
            "get_bwd_recv_ops",
            "get_fwd_send_ops",
            "get_bwd_send_ops",
            "clear_runtime_states",
            "forward_one_chunk",
            "backward_one_chunk",
        ),
    ),
}


def _check() -> None:
    missing = [
        f"{where}.{name}"
        for where, (owner, names) in _NEEDED.items()
        for name in names
        if not hasattr(owner, name)
    ]
    if missing:
        raise ServiceError(
            f"torch {torch.__version__} lacks what swift builds on: {', '.join(missing)}; install torch 2.13"
        )


_check()

StageBase = _stage._PipelineStageBase
TracedStage = _stage._PipelineStage
Schedule = _schedules._PipelineSchedule
TensorMeta = _utils._TensorMeta
ForwardMeta = _utils._StageForwardMeta
BackwardMeta = _utils._StageBackwardMeta


def schedule_stages(schedule: Any) -> list[Any]:
    """The stages of a single-stage or looped schedule."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def schedule_microbatches(schedule: Any) -> int:
    return int(schedule._n_microbatches)


def wrap_loss(schedule: Any, wrapper: Any) -> None:
    """Puts ``wrapper(loss_fn)`` in the place of the schedule's loss function, if it has one."""
    if schedule._loss_fn is not None:
        schedule._loss_fn = wrapper(schedule._loss_fn)


def clear_schedule(schedule: Any) -> None:
    """Forgets a half-done step. A successful step leaves all of these empty itself."""
    schedule._internal_losses.clear()
    for name in ("fwd_recv_ops", "bwd_recv_ops"):
        if hasattr(schedule, name):
            getattr(schedule, name).clear()
    if hasattr(schedule, "backward_counter"):
        schedule.backward_counter.clear()
    for stage in schedule_stages(schedule):
        stage.clear_runtime_states()
        for cache in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
            cache.clear()


def meta_to_json(metas: Iterable[Any]) -> list[Any]:
    """Tensor metadata as JSON. DTensor metadata is not supported: it names a mesh of live process groups."""
    out: list[Any] = []
    for meta in metas:
        if meta is None:
            out.append(None)
        elif isinstance(meta, TensorMeta):
            out.append(
                {
                    "shape": list(meta.shape),
                    "stride": list(meta.stride),
                    "dtype": str(meta.dtype).removeprefix("torch."),
                    "requires_grad": bool(meta.requires_grad),
                }
            )
        else:
            raise ServiceError(f"a boundary tensor with metadata {type(meta).__name__} cannot be logged yet")
    return out


def meta_from_json(items: list[Any]) -> tuple[Any, ...]:
    return tuple(
        None
        if item is None
        else TensorMeta(
            shape=torch.Size(item["shape"]),
            stride=tuple(item["stride"]),
            dtype=getattr(torch, item["dtype"]),
            requires_grad=item["requires_grad"],
        )
        for item in items
    )


def set_generator_seed(seed: int, device: torch.device) -> None:
    """Seeds the default generators. The CPU call takes 1 µs where `torch.manual_seed` takes 72."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def set_operation_timeout(timeout: timedelta) -> None:
    """The longest an operation of the default group may take (its construction may have had another bound)."""
    _c10d._set_pg_timeout(timeout)
