"""The parameters with which a process begins: a step makes none, removes none and leaves their types and shapes.

A process that takes over a lost rank makes its modules as the script does before `session.run`. It can load no other
parameters than those.
"""

from operator import is_

import torch

from swift.errors import UsageError


class FirstParameters:
    """Those of one rank, by the names that they have in states."""

    def __init__(self) -> None:
        self._remembered = False
        self._parameters: list[torch.nn.Parameter] = []
        self._names: list[str] = []
        self._forms: list[tuple[torch.dtype, torch.Size]] = []

    def remember(self, parameters: list[torch.nn.Parameter], names: list[str]) -> None:
        self._remembered = True
        self._parameters, self._names, self._forms = parameters, names, _forms(parameters)

    def check(self, parameters: list[torch.nn.Parameter], names: list[str]) -> None:
        """Raises UsageError for a step that has made or removed parameters, or made other things of them. A step may
        put another object in a parameter's place, if it has the name, the type and the shape of the first."""
        if not self._remembered:
            return
        forms = _forms(parameters)
        same = len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))
        if same and forms == self._forms:
            return
        if other := set(self._names) ^ set(names):
            raise UsageError(
                f"train_step has made or removed parameters ({', '.join(sorted(other)[:3])}): a process that "
                "replaces a lost rank makes the modules as they are before session.run, and cannot load them; make all "
                "parameters there, frozen (requires_grad_(False)) and out of use until a step wants them"
            )
        first = dict(zip(self._names, self._forms, strict=True))
        if changed := [name for name, form in zip(names, forms, strict=True) if form != first[name]]:
            raise UsageError(
                f"train_step has changed the type or the shape of parameters ({', '.join(changed[:3])}): a process "
                "that replaces a lost rank makes the modules as they are before session.run, and cannot load them; "
                "make them so there"
            )
        self.remember(parameters, names)


def check_ready(module: torch.nn.Module) -> None:
    """Raises UsageError for a module that makes its parameters in its first forward."""
    lazy = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, lazy):
            raise UsageError(
                f"{name} of a lazy module has no shape yet; call the module once (under torch.no_grad()) before you "
                "pass it to the session, and make the optimizer after that"
            )


def _forms(parameters: list[torch.nn.Parameter]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(parameter.dtype, parameter.shape) for parameter in parameters]
