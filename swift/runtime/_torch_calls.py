"""A call of a torch schedule, carried out by somebody else: the private names of schedules and stages that this takes.

Beside `_torch`, which has the rest.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import schedules as _schedules

from swift.runtime import _torch

_torch.require(
    {
        "torch.distributed.pipelining.schedules._PipelineSchedule": (
            _schedules._PipelineSchedule,
            ("_check_inputs", "_compute_loss", "_update_losses"),
        )
    }
)


def activations_held(schedule: Any) -> tuple[int, ...] | None:
    """By pipeline rank: of how many microbatches, over its stages, activations are held at a time, at most. None:
    nobody knows."""
    count = _torch.schedule_microbatches(schedule)
    if type(schedule) is _schedules.Schedule1F1B:
        return tuple(min(count, schedule._num_stages - rank) for rank in range(schedule._num_stages))
    if type(schedule) is _schedules.ScheduleGPipe:
        return (count,) * schedule._num_stages
    if _torch.schedule_actions(schedule) is None:
        return None
    return tuple(
        _most_held(_torch.actions_of(schedule.pipeline_order_with_comms[rank]))
        for rank in sorted(schedule.pipeline_order_with_comms)
    )


def _most_held(actions: Iterable[tuple[int, str, int]]) -> int:
    held = most = 0
    for _, kind, _ in actions:
        held += (kind == "F") - (kind in "BW")
        most = max(most, held)
    return most


def instead_of_calls(schedule: Any, call: Any) -> None:
    """What the schedule would do with its microbatches, ``call(schedule, its own way, arguments by name)`` does."""
    inner = schedule._step_microbatches
    signature = inspect.signature(inner)

    def step_microbatches(*args: Any, **kwargs: Any) -> Any:
        return call(schedule, lambda: inner(*args, **kwargs), signature.bind(*args, **kwargs).arguments)

    schedule._step_microbatches = step_microbatches


def split_inputs(schedule: Any, call: dict[str, Any]) -> None:
    """In a call with these arguments: `arg_mbs` and `kwarg_mbs` have an entry for each microbatch from then on."""
    given = [call.get(key) for key in ("arg_mbs", "kwarg_mbs", "target_mbs", "losses")]
    call["arg_mbs"], call["kwarg_mbs"] = schedule._check_inputs(*given)


def initialize_stages(schedule: Any, call: dict[str, Any]) -> None:
    """What every schedule does first in a call with these arguments: in the first one shapes are learnt."""
    split_inputs(schedule, call)
    arg_mbs, kwarg_mbs = call["arg_mbs"], call["kwarg_mbs"]
    targets = call.get("target_mbs")
    first = (arg_mbs[0], kwarg_mbs[0], targets[0] if targets is not None else None)
    initialize = getattr(schedule, "_initialize_stages", None) or schedule._initialize_stage
    loss = (call.get("loss_kwargs"),) if len(inspect.signature(initialize).parameters) > 3 else ()
    initialize(*first, *loss)


def skips_stages(stage: Any) -> bool:
    """It gets tensors from others than the stage before it, or sends some to others than the one behind it."""
    sources = {info.source for info in stage.args_recv_info.get(0, ()) if not info.is_root_arg}
    sent = {to for stages in stage.act_send_info.values() for to in stages if to is not None}
    return bool(sources - {stage.stage_index - 1} or sent - {stage.stage_index + 1})


def compute_loss(schedule: Any, output: Any, target: Any, loss_kwargs: Any) -> Any:
    """Of one microbatch; None if the schedule has no loss function."""
    if schedule._loss_fn is None:
        return None
    loss = (loss_kwargs,) if loss_kwargs is not None else ()
    return schedule._compute_loss(output, target, *loss)


def give_losses(schedule: Any, own: list[Any], call: dict[str, Any]) -> None:
    """The losses of this rank's own microbatches, in their order, where a trainer expects them."""
    schedule._internal_losses[:] = own
    schedule._update_losses(_torch.schedule_stages(schedule), call.get("losses"))


def free_chunk(stage: Any) -> int:
    """The first number of a microbatch that no schedule of the stage uses."""
    return 1 + max((*stage.args_recv_info, *stage.grad_recv_info), default=-1)


@contextmanager
def more_chunks(stage: Any, chunks: Iterable[int]) -> Iterator[None]:
    """In here there are receive buffers for these numbers of microbatches as well, like those of the first one."""
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
