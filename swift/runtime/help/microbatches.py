"""Some microbatches of a stage, each forward and backward before the next: the least memory."""

from collections.abc import Callable
from typing import Any

import torch

from swift.runtime import _torch

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


class OneByOne(_torch.SingleSchedule):
    """A schedule that is given a stage's microbatches by number; nothing is sent or received.

    What a forward and a backward compute does not depend on the order of microbatches; what is added to gradients
    does, and that order is the same as torch's own schedules have (`_torch.in_order`).
    """

    def run(
        self, numbers: range, inputs: Inputs, target: Callable[[int], torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The losses by microbatch, if the stage is the last one. Gradients are not scaled."""
        stage: Any = self._stage
        schedule: Any = self  # torch's has no types
        stage.has_backward = True
        stage.clear_runtime_states()
        losses: dict[int, torch.Tensor] = {}
        for mb in numbers:
            args, kwargs = inputs(mb)
            goal = target(mb) if stage.is_last else None
            schedule._initialize_stage(args, kwargs, goal)  # the first time: shapes are inferred
            stage.get_fwd_recv_ops(mb)
            output = stage.forward_one_chunk(mb, args, kwargs, save_forward_output=False)
            stage.get_fwd_send_ops(mb)
            loss = schedule._compute_loss(output, goal) if stage.is_last else None
            stage.get_bwd_recv_ops(mb)
            stage.backward_one_chunk(mb, loss=loss, last_backward=False)
            stage.get_bwd_send_ops(mb)
            if isinstance(loss, torch.Tensor):
                losses[mb] = loss.detach()
        return losses

    def _step_microbatches(self, *_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("microbatches are given by number: call run")
