"""Gradients that accumulate within a step or carry over from one step to the next.

Most trainers zero gradients before using them, and then none have to be kept. A trainer that accumulates over several
steps, or that skips an update, continues with them: they are a part of its state, and are restored if a step is
dropped. A step shows which kind a trainer is. If a gradient was there at the step's begin and is the same tensor at its
end, it was added to, or zeroed in place (which needs a tensor to zero). If it is the same tensor when an optimizer
steps, that step updates by it. A step that ends without an update, but with gradients, may be the first of several.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from swift_ft import torch_private
from swift_ft.state.module_state import put_into
from swift_ft.state.rng import Randomness

# A whole model, trained without a pipeline.


class WholeModule:
    """A module that is not a pipeline stage, for the session's handling of a stage's state, without a boundary.

    A rank may have several (a generator and a discriminator). Each counts as the one stage of a pipeline of one.
    """

    stage_index, num_stages = 0, 1
    stage_index_to_group_rank: Mapping[int, int] = MappingProxyType({0: 0})
    grad_scale = 1

    def __init__(self, module: torch.nn.Module):
        self.submod = module
        self.last_backward = True  # False while gradients are only accumulated
        self._forwards = 0
        self._numbers: dict[int, int] = {}
        """State of torch's generator before a forward of this step -> the forward's number."""

    def seeded_by(self, randomness: Randomness, number: int) -> None:
        """Gives each forward generators of its own, independent of earlier draws. A forward that is recomputed in
        backward (`torch.utils.checkpoint` of the whole module) gets the same ones again. It is recognized by torch's
        generator state, which torch restores to its value at the checkpoint."""

        def before_forward(_args: Any) -> None:
            key = torch_private.digest_of_generator()
            if torch_private.is_in_backward():
                if key in self._numbers:
                    randomness.whole(number, self._numbers[key])
                return
            self._numbers[key] = self._forwards
            randomness.whole(number, self._forwards)
            self._forwards += 1

        self.submod.register_forward_pre_hook(torch_private.ModuleHook(before_forward), prepend=True)

    def begin_step(self) -> None:
        self._forwards, self._numbers = 0, {}

    def streams_read(self) -> list[str]:
        """(replay) Returns no streams: the module has no neighbours."""
        return []


LEFT = "gradients that a step leaves"
Named = dict[str, torch.nn.Parameter]


class _Left(NamedTuple):
    gradient: torch.Tensor
    version: int
    value: torch.Tensor | None
    """A copy of the gradient, if it may be wanted."""


class LeftGradients:
    """Gradients that a step leaves. ``begin`` a step → ``end`` it, or ``restore``; ``state``, ``load``"""

    def __init__(self) -> None:
        self.wanted: bool | None = None
        """True if steps continue with the previous step's gradients. None: not known yet."""
        self._used = False
        """True once an update has used the previous step's gradients unchanged."""
        self._adds = False
        """True once a step has added to those of one without an update. (Zeroing in place keeps the tensor as well.)"""
        self._open = False
        """True if the previous step has left gradients without an update."""
        self._begun: tuple[bool | None, bool, bool] = (None, False, False)
        """Values of `wanted`, `_used` and `_adds` when the step began."""
        self._known = (False, False, False)
        self._left: dict[torch.nn.Parameter, _Left] = {}

    def begin(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._begun = (self.wanted, self._used, self._adds)
        self._left = {
            p: _Left(p.grad, p.grad._version, None if self.wanted is False else p.grad.detach().clone())
            for p in parameters
            if p.grad is not None
        }

    def update_begins(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """(before an optimizer's step) Marks gradients as wanted if the step uses values from before this step."""
        for parameter in parameters:
            left = self._left.get(parameter)
            if (
                left is not None
                and parameter.grad is left.gradient
                and left.gradient._version == left.version
            ):
                self.wanted = self._used = True

    def end(self, parameters: Sequence[torch.nn.Parameter], *, updated: bool) -> None:
        """Learns from the finished step. `updated`: an optimizer has stepped. A step without gradients is ignored."""
        kept = [left for p, left in self._left.items() if p.grad is left.gradient]
        if any(updated or left.gradient._version != left.version for left in kept):
            self.wanted = True
        elif self.wanted is None and self._left and updated:
            self.wanted = False
        self._adds = self._adds or (bool(kept) and self._open)
        self._open = not updated and any(p.grad is not None for p in parameters)
        if self.wanted is False and self._open:
            self.wanted = None  # they may be accumulated over several steps from here on
        self._left = {}

    def restore(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Drops the step and restores its gradients. A gradient without a copy is not wanted: the trainer zeroes it
        anyway. What was learned in the step is forgotten, because a replacement has to learn it in the same step."""
        self.wanted, self._used, self._adds = self._begun
        for parameter in parameters:
            left = self._left.get(parameter)
            parameter.grad = None
            if left is not None and left.value is not None:
                with torch.no_grad():  # not into `detach()`: that of a sparse tensor is another tensor
                    left.gradient.copy_(left.value)
                parameter.grad = left.gradient
        self._left = {}

    def state(self, named: Named) -> dict[str, Any]:
        """Returns the gradients by parameter name if they may be wanted, and the flags, which a joiner needs too."""
        given = {} if self.wanted is False else named
        left = {name: _as_parts(p.grad.detach()) for name, p in given.items() if p.grad is not None}
        told = {"wanted": self.wanted, "of": left} if left or self.wanted is not None else {}
        known = {"used": self._used, "adds": self._adds, "open": self._open}
        return told | {word: True for word, is_so in known.items() if is_so}

    def parts(
        self,
        named: Named,
        optimized: Collection[torch.nn.Parameter],
        elsewhere: Collection[torch.nn.Parameter],
    ) -> dict[str, Any]:
        """Returns the part of `state` that replicas must have in common, once it is known to be wanted. The session
        averages gradients at the end of each step, also of one without an update. It does not average gradients that
        come after an update and are used by the next one, nor those that DDP is to average later (`elsewhere`). A
        replacement would have another rank's."""
        compared = optimized if self._used else elsewhere if self._adds else ()
        left = self.state({name: p for name, p in named.items() if p in compared}).get("of", {})
        return {LEFT: left} if left else {}

    def news(self) -> bool:
        """(a step has ended) Returns whether this step has shown that gradients are wanted or used."""
        before, self._known = self._known, (bool(self.wanted), self._used, self._adds)
        return any(self._known) and self._known != before

    def load(self, named: Named, state: dict[str, Any]) -> None:
        """Loads the result of `state`. An empty dict means that no step has left gradients."""
        self.wanted, left = state.get("wanted"), state.get("of", {})
        self._used, self._adds, self._open = (bool(state.get(word)) for word in ("used", "adds", "open"))
        self._known = (bool(self.wanted), self._used, self._adds)
        for name, parameter in named.items():
            given = None if left.get(name) is None else _again(left[name])
            # The existing gradient may be a view of the trainer's memory.
            parameter.grad = None if given is None else put_into(parameter.grad, given)


def _as_parts(gradient: torch.Tensor) -> Any:
    """Returns a sparse gradient (of `nn.Embedding(sparse=True)`) as its parts: a state holds dense tensors only."""
    if gradient.layout is not torch.sparse_coo:
        return gradient
    parts = {"indices": gradient._indices(), "values": gradient._values(), "shape": list(gradient.shape)}
    return {**parts, "coalesced": gradient.is_coalesced()}


def _again(told: Any) -> torch.Tensor:
    if isinstance(told, torch.Tensor):
        return told
    return torch.sparse_coo_tensor(
        told["indices"],
        told["values"],
        told["shape"],
        is_coalesced=told["coalesced"],
        check_invariants=True,
    )


@contextmanager
def accumulating(units: Sequence[WholeModule]) -> Iterator[None]:
    """Marks backward passes in the block as not followed by an update."""
    with ExitStack() as stack:
        for unit in units:
            unit.last_backward = False
            if isinstance(unit.submod, DistributedDataParallel):
                stack.enter_context(unit.submod.no_sync())
            if isinstance(unit.submod, FSDPModule):
                unit.submod.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit in units:
                unit.last_backward = True
                if isinstance(unit.submod, FSDPModule):
                    unit.submod.set_requires_gradient_sync(True)
