"""Some actions of a rank's step, walked over the rank's stages: what they receive and send is the log's business."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from swift.runtime import _torch
from swift.runtime.shared_replay.actions import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action

Inputs = Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
"""(stage, microbatch) -> what enters it from outside."""
Target = Callable[[int], torch.Tensor]


class ActionExecutor(_torch.Schedule):
    """A schedule that is given its actions.

    It calls what torch's own runtime calls, in the same order for each microbatch, and hands what passes between two
    adjacent stages of the rank from one to the other, as that does in V-schedules. Gradients are not scaled.
    """

    def __init__(self, stages: Sequence[Any], microbatches: int, loss_fn: Any):
        super().__init__(microbatches, loss_fn)
        self._stages = list(stages)
        self._by_index = {stage.stage_index: stage for stage in stages}
        self._inferred = False

    def run(
        self,
        actions: Sequence[Action],
        inputs: Inputs,
        target: Target,
        weighing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> dict[int, torch.Tensor]:
        """The losses by microbatch, if the last stage is among them. Weights' gradients of split backwards are computed
        inside of `weighing()`."""
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        outside = Once(inputs, target)
        if not self._inferred:
            self._infer(actions[0].microbatch, outside)
        self._begin(actions)
        losses: dict[int, Any] = {}
        for index, kind, mb in actions:
            stage = self._by_index[index]
            if kind == FORWARD:
                output = self._forward(stage, mb, outside)
                if stage.is_last:
                    losses[mb] = self._compute_loss(output, outside.target(mb))  # type: ignore[no-untyped-call]
            elif kind == BACKWARD_WEIGHT:
                with weighing():
                    stage.backward_weight_one_chunk(mb)
            else:
                self._backward(stage, mb, losses.get(mb) if stage.is_last else None, kind == BACKWARD)
        self._end()
        return {mb: loss.detach() for mb, loss in losses.items() if isinstance(loss, torch.Tensor)}

    def _begin(self, actions: Sequence[Action]) -> None:
        """Shapes are known, nothing is computed yet."""

    def _end(self) -> None:
        """All is computed."""

    def _infer(self, mb: int, outside: "Once") -> None:
        """Shapes, as every process does it before its first forward."""
        of = {stage.stage_index: outside.ahead(stage.stage_index, mb) for stage in self._stages}
        args = next((of[stage.stage_index][0] for stage in self._stages if stage.is_first), ())
        _, kwargs = of[self._stages[0].stage_index]
        goal = outside.target_ahead(mb) if any(stage.is_last for stage in self._stages) else None
        self._initialize_pp_stages(self._stages, args, kwargs, goal, False, False)
        self._inferred = True

    def _forward(self, stage: Any, mb: int, outside: "Once") -> Any:
        args, kwargs = outside.inputs(stage.stage_index, mb)
        before, behind = self._beside(stage)
        if before is None:
            stage.get_fwd_recv_ops(mb)
        output = stage.forward_one_chunk(mb, args, kwargs, save_forward_output=False)
        if behind is None:
            stage.get_fwd_send_ops(mb)
        else:
            behind.set_local_fwd_input(output, mb)
        return output

    def _backward(self, stage: Any, mb: int, loss: Any, whole: bool) -> None:
        before, behind = self._beside(stage)
        if behind is None:
            stage.get_bwd_recv_ops(mb)
        stage.backward_one_chunk(mb, loss=loss, full_backward=whole, last_backward=False)
        if before is None:
            stage.get_bwd_send_ops(mb)
        else:
            before.set_local_bwd_input(stage.get_local_bwd_output(mb), mb)

    def _beside(self, stage: Any) -> tuple[Any, Any]:
        """The stages before and behind it, where they are on this rank."""
        return self._by_index.get(stage.stage_index - 1), self._by_index.get(stage.stage_index + 1)

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("actions are given: call run")

    _step_microbatches = step


class Once:
    """What enters from outside: each is read once, though shapes are inferred from the first before it is used."""

    def __init__(self, inputs: Inputs, target: Target):
        self._inputs, self._target = inputs, target
        self._ahead: dict[tuple[int, int], tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._targets: dict[int, torch.Tensor] = {}

    def ahead(self, stage: int, mb: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._ahead[stage, mb] = self._inputs(stage, mb)
        return self._ahead[stage, mb]

    def target_ahead(self, mb: int) -> torch.Tensor:
        self._targets[mb] = self._target(mb)
        return self._targets[mb]

    def inputs(self, stage: int, mb: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._ahead.pop((stage, mb), None) or self._inputs(stage, mb)

    def target(self, mb: int) -> torch.Tensor:
        target = self._targets.pop(mb, None)
        return self._target(mb) if target is None else target
