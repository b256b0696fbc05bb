"""Gradients that are added up: in a step, and those that a step leaves to the next one.

Most trainers zero them before they are looked at, and then nothing has to be kept. One that accumulates over several
steps, or that skips an update, goes on with them: they are a part of its state, and go back if a step is dropped.
Which kind it is shows in a step: a gradient that was there when the step began, and is the same tensor when it ends,
was added to, or zeroed in place (which needs a tensor to zero). If it is the same tensor when an optimizer steps, it is
what that step updates by. A step that ends without an update, but with gradients, may be the first of several.
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
    """A module that is no pipeline stage: what the session does with a stage's state, without a boundary.

    A rank may have several (a generator and a discriminator): all are the one stage of a pipeline of one.
    """

    stage_index, num_stages = 0, 1
    stage_index_to_group_rank: Mapping[int, int] = MappingProxyType({0: 0})
    grad_scale = 1

    def __init__(self, module: torch.nn.Module):
        self.submod = module
        self.last_backward = True  # False while gradients are only accumulated
        self._forwards = 0
        self._numbers: dict[int, int] = {}
        """The state of torch's generator before a forward of this step -> the forward's number."""

    def seeded_by(self, randomness: Randomness, number: int) -> None:
        """Each forward begins with generators of its own: what was drawn before, and how often, does not count. One
        that is computed again in backward (`torch.utils.checkpoint` of the whole module) has those that it had before:
        torch puts the generators back to what they were when the checkpoint was reached."""

        def before_forward() -> None:
            key = torch_private.digest_of_generator()
            if torch_private.is_in_backward():
                if key in self._numbers:
                    randomness.whole(number, self._numbers[key])
                return
            self._numbers[key] = self._forwards
            randomness.whole(number, self._forwards)
            self._forwards += 1

        torch_private.before_forward(self.submod, before_forward)

    def begin_step(self) -> None:
        self._forwards, self._numbers = 0, {}

    def streams_read(self) -> list[str]:
        """(replay) Nothing: it has no neighbours."""
        return []


LEFT = "gradients that a step leaves"
Named = dict[str, torch.nn.Parameter]


class _Left(NamedTuple):
    gradient: torch.Tensor
    version: int
    value: torch.Tensor | None
    """A copy, if it may be wanted."""


class LeftGradients:
    """(state) ``begin`` a step → ``end`` it, or ``restore``; ``state``, ``load``"""

    def __init__(self) -> None:
        self.wanted: bool | None = None
        """Steps go on with what the one before has left. None: not known yet."""
        self._used = False
        """An update was by what the step before has left, as it was."""
        self._adds = False
        """Steps add to what one without an update has left. (A gradient that is zeroed in place is the same tensor.)"""
        self._open = False
        """The step before has left some, without an update."""
        self._begun: tuple[bool | None, bool, bool] = (None, False, False)
        """What was known when the step began."""
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
        """(an optimizer that has these steps) If it does so by what was there before the step, that is wanted."""
        for parameter in parameters:
            left = self._left.get(parameter)
            if (
                left is not None
                and parameter.grad is left.gradient
                and left.gradient._version == left.version
            ):
                self.wanted = self._used = True

    def end(self, parameters: Sequence[torch.nn.Parameter], *, updated: bool) -> None:
        """`updated`: an optimizer has stepped. A step that does nothing with gradients says nothing."""
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
        """The step is dropped. What is not known to be wanted, and was not kept, is zeroed by the trainer anyway. What
        the step has shown is forgotten: a replacement, which was not there, is to learn it in the same step."""
        self.wanted, self._used, self._adds = self._begun
        for parameter in parameters:
            left = self._left.get(parameter)
            parameter.grad = None
            if left is not None and left.value is not None:
                with torch.no_grad():  # not into `detach()`, which of a sparse one is another tensor
                    left.gradient.copy_(left.value)
                parameter.grad = left.gradient
        self._left = {}

    def state(self, named: Named) -> dict[str, Any]:
        """Of parameters by name, if they may be wanted, and whether they are: whoever joins is to know it as well."""
        given = {} if self.wanted is False else named
        left = {name: _told(p.grad.detach()) for name, p in given.items() if p.grad is not None}
        told = {"wanted": self.wanted, "of": left} if left or self.wanted is not None else {}
        known = {"used": self._used, "adds": self._adds, "open": self._open}
        return told | {word: True for word, is_so in known.items() if is_so}

    def parts(
        self,
        named: Named,
        optimized: Collection[torch.nn.Parameter],
        elsewhere: Collection[torch.nn.Parameter],
    ) -> dict[str, Any]:
        """What replicas must have in common of `state`, once it is known to be wanted. The session averages gradients
        at the end of each step, also of one without an update; but not those that come behind an update and are used
        by the next one, nor those that DDP is to average later (`elsewhere`). A replacement would have another
        rank's."""
        compared = optimized if self._used else elsewhere if self._adds else ()
        left = self.state({name: p for name, p in named.items() if p in compared}).get("of", {})
        return {LEFT: left} if left else {}

    def news(self) -> bool:
        """(a step has ended) Since this step it is known that they are wanted, or used."""
        before, self._known = self._known, (bool(self.wanted), self._used, self._adds)
        return any(self._known) and self._known != before

    def load(self, named: Named, state: dict[str, Any]) -> None:
        """Of `state`, or of nothing: then no step has left any."""
        self.wanted, left = state.get("wanted"), state.get("of", {})
        self._used, self._adds, self._open = (bool(state.get(word)) for word in ("used", "adds", "open"))
        self._known = (bool(self.wanted), self._used, self._adds)
        for name, parameter in named.items():
            given = None if left.get(name) is None else _again(left[name])
            # What is there may be a view of what the trainer has.
            parameter.grad = None if given is None else put_into(parameter.grad, given)


def _told(gradient: torch.Tensor) -> Any:
    """A sparse one (of `nn.Embedding(sparse=True)`) by its parts: a state holds dense tensors only."""
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
    """Backward passes in here are none that an update follows."""
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
