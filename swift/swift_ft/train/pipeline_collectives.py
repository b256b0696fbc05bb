"""Collectives over a pipeline in a step: sums, the norm of gradients, tied weights. Each result is logged.

Legend: a *crossing* collective spans several stages, so a replay has no peers to run it with.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swift_ft import torch_private
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import UsageError
from swift_ft.state import fsdp
from swift_ft.state.tensors import laid_like, summed
from swift_ft.train.boundary_log import Channel

if TYPE_CHECKING:
    from swift_ft.train.participants import Site

# Weights shared by several stages (tied embeddings): the gradient is the sum over these stages, in rank order.
#
#     (trainer) ``session.tie(parameter, ranks)`` on each of these ranks
#     (session, first start) ``align``: all start with the first rank's value
#     (updates) ``sum`` once, before the norm is taken and before the update; ``stepped`` after it
#
# Gradients are summed after they are averaged over the replicas, so that all data-parallel ranks have the same bits.


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


def norm_of(parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Returns the norm from the parts of all stages, added in their order."""
    if norm_type == float("inf"):
        return torch.stack(parts).max()
    return summed(parts) ** (1.0 / norm_type)


def clips(norm: torch.Tensor, max_norm: float) -> bool:
    """Returns whether `torch.nn.utils.clip_grads_with_norm_` would change gradients. True also for inf and nan."""
    return not bool(max_norm / (norm + 1e-6) >= 1.0)


def no_scaler() -> UsageError:
    return UsageError(
        "updates='wait_free' with a gradient scaler: gradients are applied before they could be "
        "unscaled; use updates='after_backward'"
    )


class Crossing:
    """Sums, the norm and the unscaling of gradients over all stages, for the session."""

    def __init__(self, site: "Site", groups: Mapping[str, ReconfigurableGroup]):
        self._site = site
        self._channel, self._updates = site.channel, site.state.updates
        self._groups = groups

    def all_reduce(self, tensor: torch.Tensor, name: str, ranks: Sequence[int] | None) -> torch.Tensor:
        group = self._groups["pipeline"]
        if ranks is not None:
            group = group.part(ranks)
        self._updates.communicates()
        if group.answers is not None:
            group.answers.trainers(self._channel.step)
        with self._updates.spoiling():
            total = self._channel.collective(
                name, lambda: summed(group.gathered(tensor)), tensor.device, group.ranks
            )
            return laid_like(total, tensor)

    def reduce_gradients(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._updates.check_whole()
        if optimizer is None and len(self._updates.optimizers) > 1:
            raise UsageError(
                "reduce_gradients() with several optimizers; name the one that is about to step: "
                "session.reduce_gradients(optimizer)"
            )
        self._updates.communicates()
        self._updates.reduce(optimizer)

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if self._updates.wait_free:
            raise no_scaler()
        if not any(scaler is value for value in self._site.state.objects.values()):
            raise UsageError(
                "unscale_ with a gradient scaler that the session does not know: a recovery could not put its scale "
                "back; call session.register(scaler=scaler) before session.run"
            )
        self.reduce_gradients(optimizer)
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        scaler.scale(torch.zeros((), device=device))  # only the last stage has a loss to scale
        scaler.unscale_(optimizer)
        enabled = scaler.is_enabled()
        found = torch_private.found_infinite(scaler, optimizer, device) if enabled else []
        own = torch.stack([each.cpu() for each in found]).max() if found else torch.zeros(())

        def anywhere() -> torch.Tensor:
            told = torch.stack([own, torch.tensor(float(enabled)), torch.tensor(float(not enabled))])
            for name in ("tensor", "shard"):
                if name in self._groups:
                    told = torch.stack(self._groups[name].gathered(told)).amax(0)
            return torch.stack(self._groups["pipeline"].gathered(told)).amax(0)

        with self._updates.spoiling():
            if (
                self._site.staggering is not None and self._updates.ahead
            ):  # assumes that no other stage has found any
                self._site.staggering.found_infinite(own)
                return
            total, some, others = self._channel.collective("unscale_", anywhere, own.device).unbind()
        if some and others:
            raise UsageError(
                "unscale_ with a gradient scaler that some ranks have enabled and others not; make it alike on all "
                "ranks, also on those that compute no loss"
            )
        if self._site.staggering is not None:
            self._site.staggering.count_infinite(total)
        for each in found:
            each.copy_(total)

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.nn.Parameter] | torch.Tensor,
        max_norm: float,
        norm_type: float,
        uncounted: Iterable[torch.nn.Parameter],
    ) -> torch.Tensor:
        self._updates.check_whole()
        self._updates.communicates()
        if self._updates.wait_free:
            raise UsageError(
                "clip_grad_norm_ with updates='wait_free': gradients are applied before their norm is known; "
                "use updates='after_backward'"
            )
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._updates.reduce_of(given)
        own = [fsdp.stand_in(parameter) for parameter in given]
        elsewhere = {id(parameter) for parameter in (*uncounted, *self._updates.ties.uncounted())}
        counted: list[Any] = [parameter for parameter in given if id(parameter) not in elsewhere]
        sharded = [parameter for parameter in counted if fsdp.is_sharded(parameter)]
        infinite = norm_type == float("inf")
        device = given[0].device if given else torch.device("cpu")

        def own_part() -> torch.Tensor:
            grads = [p.grad for p in counted if p.grad is not None and not fsdp.is_sharded(p)]
            return fsdp.part_of_norm(grads, norm_type, device)

        def total() -> torch.Tensor:
            part = own_part()
            if sharded:
                of_shards = fsdp.norm_over_shards(sharded, norm_type, device)
                part = torch.maximum(part, of_shards) if infinite else part + of_shards
            return norm_of(self._groups["pipeline"].gathered(part), norm_type)

        if self._site.staggering is not None and self._updates.ahead:  # assumes that the norm does not clip
            with self._updates.spoiling():
                return self._site.staggering.norm(own_part(), norm_type, max_norm)
        with self._updates.spoiling():
            norm = self._channel.collective("clip_grad_norm_", total, device)
        if self._site.staggering is not None:
            self._site.staggering.clipped(norm, max_norm)
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm
