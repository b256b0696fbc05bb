"""Collectives that the session runs in a step: sums and the norm of gradients. Each result is logged.

Legend: a *crossing* collective spans several stages of the pipeline, so a replay has no peers to run it with.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from swift_ft import torch_private
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import UsageError
from swift_ft.state import fsdp
from swift_ft.state.tensors import laid_like, summed
from swift_ft.train import updates as wait_free
from swift_ft.train.participants import Site
from swift_ft.train.staggering import norm_of


class Crossing:
    def __init__(self, site: Site, groups: Mapping[str, ReconfigurableGroup]):
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
            raise wait_free.no_scaler()
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
            self._site.staggering.told_infinite(total)
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
