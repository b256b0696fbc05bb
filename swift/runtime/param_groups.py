"""Which parameters are in which groups of their optimizers: a trainer may give an optimizer another group while it
trains. (Which are frozen is a part of the modules: `swift.runtime.before`, `swift.runtime.beside`.)"""

from collections.abc import Mapping, Sequence

import torch

from swift.errors import ServiceError

Named = Mapping[str, torch.nn.Parameter]
Groups = list[list[list[str]]]
"""Names of the parameters in each group of each optimizer."""


class ParamGroups:
    """``ParamGroups(optimizers)`` … ``put_back()``: the groups that a dropped step has made or changed go back."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups = [
            (optimizer, [(group, list(group["params"])) for group in optimizer.param_groups])
            for optimizer in optimizers
        ]

    def put_back(self) -> None:
        for optimizer, groups in self._groups:
            optimizer.param_groups[:] = [group for group, _ in groups]
            for group, parameters in groups:
                group["params"][:] = parameters


def told(named: Named, optimizers: Sequence[torch.optim.Optimizer]) -> Groups:
    names = {id(parameter): name for name, parameter in named.items()}
    return [
        [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def become(named: Named, optimizers: Sequence[torch.optim.Optimizer], wanted: Groups) -> None:
    """As `told` has said. Raises ServiceError for names that this trainer does not have."""
    for optimizer, groups in zip(optimizers, wanted, strict=True):
        if told(named, [optimizer]) == [groups]:
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
