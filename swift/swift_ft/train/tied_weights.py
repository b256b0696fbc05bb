"""Weights shared by several stages (tied embeddings): the gradient is the sum over these stages, in rank order.

(trainer) ``session.tie(parameter, ranks)`` on each of these ranks
(session, first start) ``align``: all start with the first rank's value
(updates) ``sum`` once, before the norm is taken and before the update; ``stepped`` after it

The sum is logged like any collective of the session, so that a replay has it. Gradients are summed after they are
averaged over the replicas, so that all data-parallel ranks have the same bits.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import UsageError
from swift_ft.state import fsdp
from swift_ft.state.tensors import laid_like
from swift_ft.train.boundary_log import Channel


@dataclass(eq=False, slots=True)
class Tie:
    parameter: torch.nn.Parameter
    name: str
    group: ReconfigurableGroup
    """Ranks that share the parameter, including this one."""
    counted: bool
    """Set on the one rank that counts the parameter in a norm."""
    summed: bool = False
    """Set while the gradient is the sum, until the optimizer steps."""


class Ties:
    """Ties of one rank, in the order of creation, which is the same on all ranks that share a parameter."""

    def __init__(self, channel: Channel, pipeline: ReconfigurableGroup) -> None:
        self._channel = channel
        self._pipeline = pipeline
        self._ties: list[Tie] = []

    def add(self, parameter: torch.nn.Parameter, pipeline_ranks: Sequence[int]) -> None:
        """Ties a parameter over ranks of the pipeline. Raises UsageError if it is sharded, tied already, or alone."""
        if fsdp.is_sharded(parameter):
            raise UsageError("session.tie was given a sharded parameter; leave it out of fully_shard")
        if any(tie.parameter is parameter for tie in self._ties):
            raise UsageError(
                "session.tie was given this parameter before; tie it once, with all of its ranks"
            )
        group = self._pipeline.part(pipeline_ranks)
        if len(group.ranks) == 1:
            raise UsageError(f"session.tie with ranks={list(pipeline_ranks)}: give two ranks or more")
        name = f"tie {len(self._ties)}"
        counted = group.ranks[0] == self._channel.rank
        self._ties.append(Tie(parameter, name, group, counted))

    def check(self, held: Collection[torch.Tensor]) -> None:
        """Raises UsageError for a tied parameter that no optimizer of this rank updates."""
        known = {id(parameter) for parameter in held}
        if any(id(tie.parameter) not in known for tie in self._ties):
            raise UsageError(
                "session.tie was given a parameter that no optimizer of this rank holds; give the weight itself, as it "
                "is in the stage's module"
            )

    def align(self) -> None:
        """Gives all ranks the first one's value. Raises UsageError if ranks tie different weights."""
        words_of_all = [json.loads(text) for text in self._pipeline.gathered_texts(json.dumps(self._words()))]
        ranks = self._pipeline.ranks
        for tie in self._ties:
            members = list(tie.group.ranks)
            for rank in members:
                theirs = [words for words in words_of_all[ranks.index(rank)] if words[0] == members]
                mine = [words for words in self._words() if words[0] == members]
                if theirs != mine:
                    raise UsageError(
                        f"session.tie: rank {self._channel.rank} ties {mine} and rank {rank} {theirs or 'nothing'} "
                        f"over the ranks {members}; tie the same weights in the same order on all of them"
                    )
            value = tie.parameter.data
            tie.group.run(lambda messages, value=value: messages.broadcast(value, 0))  # type: ignore[misc]

    def _words(self) -> list[Any]:
        return [
            [list(tie.group.ranks), str(tie.parameter.dtype), list(tie.parameter.shape)] for tie in self._ties
        ]

    def begin_step(self) -> None:
        for tie in self._ties:
            tie.summed = False

    def sum(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replaces the gradients of tied parameters among these by their sums, once until `stepped`."""
        for tie in self._of(parameters):
            if not tie.summed:
                self._sum(tie)
                tie.summed = True

    def stepped(self, parameters: Iterable[torch.Tensor]) -> None:
        for tie in self._of(parameters):
            tie.summed = False

    def check_closure(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._of(parameters):
            raise UsageError(
                "session.tie with an optimizer whose step takes a closure and calls it again (LBFGS); use another one"
            )

    def uncounted(self) -> list[torch.nn.Parameter]:
        return [tie.parameter for tie in self._ties if not tie.counted]

    def _of(self, parameters: Iterable[torch.Tensor]) -> list[Tie]:
        if not self._ties:
            return []
        wanted = {id(parameter) for parameter in parameters}
        return [tie for tie in self._ties if id(tie.parameter) in wanted]

    def _sum(self, tie: Tie) -> None:
        parameter = tie.parameter

        def total() -> torch.Tensor:
            """Returns the sum over the ranks that have used the parameter; empty if none has."""
            used = self._used(tie)
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            parts = tie.group.gathered(own)
            present = [part for part, is_used in zip(parts, used, strict=True) if is_used]
            whole = present[0].clone() if present else own.new_empty(0)
            for part in present[1:]:
                whole += part
            return whole

        result = self._channel.collective(tie.name, total, tie.parameter.device, tie.group.ranks)
        if result.numel() != parameter.numel():
            return
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = laid_like(result, parameter)
            else:
                parameter.grad.copy_(result)

    def _used(self, tie: Tie) -> list[bool]:
        """Returns which ranks have a gradient. Raises UsageError if they are not at the same step."""
        step = self._channel.step
        told = tie.group.gathered(torch.tensor([step, tie.parameter.grad is not None]))
        for rank, each in zip(tie.group.ranks, told, strict=True):
            if each[0] != step:
                raise UsageError(
                    f"{tie.name} is updated in step {step} here and in step {int(each[0])} on rank {rank}; let all "
                    "ranks that share a weight decide alike whether they step"
                )
        return [bool(each[1]) for each in told]
