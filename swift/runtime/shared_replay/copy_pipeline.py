"""A copy of a recovery group: helpers that compute the same microbatches of neighbouring stages, as a small pipeline.

A helper gets activations from the helper of the stage before and gradients from that of the stage behind, over the
group of all ranks; what crosses the recovery group's ends comes out of the log. Receives are posted for the whole step
at once and sends are not waited for, so nobody is held up by anything but what it computes with.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from swift.runtime.backends.base import Pending, Wire
from swift.runtime.backends.runner import Broken
from swift.runtime.shared_replay.action_executor import ActionExecutor, Once
from swift.runtime.shared_replay.actions import Action
from swift.runtime.shared_replay.agreement import Together
from swift.runtime.shared_replay.gradient_chain import Post
from swift.runtime.tags import INNER_ACTIVATIONS, INNER_GRADIENTS


class CopyPipeline:
    """A helper's place in its copy: `ranks`, by stage."""

    def __init__(self, wire: Wire, rank: int, ranks: Sequence[int]):
        place = list(ranks).index(rank)
        self._post = Post(wire)
        self._together = Together(rank, ranks, wire)
        self._before = ranks[place - 1] if place else None
        self._behind = ranks[place + 1] if place + 1 < len(ranks) else None
        self.alone = len(ranks) == 1
        """No copy of several."""

    def receive(self, ops: Sequence[dist.P2POp], *, forward: bool) -> list[Pending]:
        """`ops`: what the owner would do, who has other neighbours."""
        peer = self._before if forward else self._behind
        return [self._post.receive(op.tensor.detach(), *_way(peer, forward)) for op in ops]

    def send(self, ops: Sequence[dist.P2POp], *, forward: bool) -> None:
        peer = self._behind if forward else self._before
        for op in ops:
            self._post.send(op.tensor.detach().contiguous(), *_way(peer, forward))

    def compare(self, given: Sequence[int]) -> None:
        """Raises ReplayRefused unless all helpers of the copy were given the same."""
        self._together.compare(given)

    def settle(self) -> None:
        """Waits until all that was sent has arrived. Raises Broken if it does not."""
        try:
            self._post.settle()
        except RuntimeError as error:
            raise Broken(str(error)) from error


def _way(peer: int | None, forward: bool) -> tuple[int, int]:
    assert peer is not None, "what passes over the ends of the group is in the log"
    return peer, INNER_ACTIVATIONS if forward else INNER_GRADIENTS


class InCopy(ActionExecutor):
    """A walk over a stage whose neighbours other helpers of the copy walk over. (Where `inner` is alone: a walk.)"""

    def __init__(self, stages: Sequence[Any], microbatches: int, loss_fn: Any, inner: CopyPipeline):
        super().__init__(stages, microbatches, loss_fn)
        self._inner = inner
        self._activations: dict[int, list[Pending]] = {}
        self._gradients: dict[int, list[Pending]] = {}

    def _begin(self, actions: Sequence[Action]) -> None:
        if self._inner.alone:
            return
        (stage,) = self._stages
        for mb in dict.fromkeys(action.microbatch for action in actions):
            self._activations[mb] = self._inner.receive(stage.get_fwd_recv_ops(mb), forward=True)
            self._gradients[mb] = self._inner.receive(stage.get_bwd_recv_ops(mb), forward=False)

    def _end(self) -> None:
        self._inner.settle()

    def _forward(self, stage: Any, mb: int, outside: Once) -> Any:
        if self._inner.alone:
            return super()._forward(stage, mb, outside)
        args, kwargs = outside.inputs(stage.stage_index, mb)
        wait_for(self._activations.pop(mb))
        output = stage.forward_one_chunk(mb, args, kwargs, save_forward_output=False)
        self._inner.send(stage.get_fwd_send_ops(mb), forward=True)
        return output

    def _backward(self, stage: Any, mb: int, loss: Any, whole: bool) -> None:
        if self._inner.alone:
            super()._backward(stage, mb, loss, whole)
            return
        wait_for(self._gradients.pop(mb))
        stage.backward_one_chunk(mb, loss=loss, full_backward=whole, last_backward=False)
        self._inner.send(stage.get_bwd_send_ops(mb), forward=False)


def wait_for(arriving: Sequence[Pending]) -> None:
    """An error of the transport is no error of the module's. Raises Broken for it."""
    try:
        for pending in arriving:
            pending.wait()
    except RuntimeError as error:
        raise Broken(str(error)) from error
