"""Which parameters are trained, and in which groups of their optimizers: a trainer may change that while it trains
(it unfreezes a layer, it gives an optimizer another group)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swift.errors import ServiceError

Named = Mapping[str, torch.nn.Parameter]


class Trained:
    """``Trained(parameters, optimizers)`` … ``put_back()``: what a dropped step has changed goes back."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters]
        self._groups = [
            (optimizer, [(group, list(group["params"])) for group in optimizer.param_groups])
            for optimizer in optimizers
        ]

    def put_back(self) -> None:
        for parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        for optimizer, groups in self._groups:
            optimizer.param_groups[:] = [group for group, _ in groups]
            for group, parameters in groups:
                group["params"][:] = parameters


def told(named: Named, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """What of this is part of a state: names of frozen parameters, and of those in each group of each optimizer."""
    names = {id(parameter): name for name, parameter in named.items()}
    return {
        "frozen": sorted(name for name, parameter in named.items() if not parameter.requires_grad),
        "groups": [
            [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ],
    }


def become(named: Named, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any]) -> None:
    """As `told` has said. Raises ServiceError for names that this trainer does not have."""
    frozen = frozenset(state["frozen"])
    for name, parameter in named.items():
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for optimizer, groups in zip(optimizers, state["groups"], strict=True):
        if told(named, [optimizer])["groups"][0] == groups:
            continue
        try:
            parameters = [[named[name] for name in group] for group in groups]
        except KeyError as error:
            raise ServiceError(
                f"the state's optimizer has a parameter {error} that this trainer lacks"
            ) from None
        # Their settings come with the optimizer's state.
        made = [dict(optimizer.defaults) for _ in groups[len(optimizer.param_groups) :]]
        optimizer.param_groups[:] = [*optimizer.param_groups[: len(groups)], *made]
        for group, own in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = own
        kept = {id(parameter) for own in parameters for parameter in own}
        for gone in [tensor for tensor in optimizer.state if id(tensor) not in kept]:
            del optimizer.state[gone]
