"""States into modules and optimizers, as they were saved: types, bits and strides.

torch's own loading is made for other purposes. An optimizer casts its state to the type of the parameter, whatever it
was; a module copies into the tensors that it has, whatever their strides. Both are followed (hooks, subclasses that
load in their own way), and what they have changed is put right, or refused.
"""

from collections.abc import Collection
from itertools import chain
from typing import Any

import torch

from swift.checkpoint.state import split
from swift.errors import ServiceError
from swift.optim.torch_names import state_left_alone
from swift.runtime.manifest import local
from swift.runtime.tensors import same_bits


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Raises ServiceError if its `state_dict` is not `saved` afterwards."""
    try:
        with state_left_alone():
            optimizer.load_state_dict(saved)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ServiceError(f"{type(optimizer).__name__} does not take its state back: {error}") from error
    if not _difference(saved, optimizer.state_dict()):
        return
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        # torch makes containers of the state anew, not all of them rightly (strings, named tuples).
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for index, parameter in enumerate(parameters):
            if index in saved["state"]:
                optimizer.state[parameter] = saved["state"][index]
    if path := _difference(saved, optimizer.state_dict()):
        raise ServiceError(
            f"{type(optimizer).__name__} does not take its state back: {path} is another one than was given to "
            "load_state_dict; let state_dict and load_state_dict agree"
        )


def load_module(module: torch.nn.Module, saved: dict[str, Any], begun: Collection[str] | None = None) -> None:
    """Raises ServiceError if it has other parameters. `begun`: the buffers with which a process begins."""
    _make_buffers(module, saved, begun)
    try:
        module.load_state_dict(saved)
    except RuntimeError as error:
        raise ServiceError(" ".join(str(error).split())) from error
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, tensor in own.items():
            value = saved.get(name)
            if not isinstance(value, torch.Tensor) or local(value).stride() == local(tensor).stride():
                continue
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and value.shape == tensor.shape:
                tensor.data = value.detach().clone(memory_format=torch.preserve_format)


def _make_buffers(module: torch.nn.Module, saved: dict[str, Any], begun: Collection[str] | None) -> None:
    """Those that a forward has made are made, those that it has not made yet go."""
    own = module.state_dict()
    for name in saved.keys() - own.keys():
        prefix, _, last = name.rpartition(".")
        try:
            owner = module.get_submodule(prefix)
        except AttributeError:
            continue  # torch says it
        if isinstance(saved[name], torch.Tensor) and last not in owner._parameters and last != "_extra_state":
            owner._buffers[last] = torch.empty_like(saved[name])
    for name in own.keys() - saved.keys():
        prefix, _, last = name.rpartition(".")
        owner = module.get_submodule(prefix)
        if last in owner._buffers and begun is not None:
            if name in begun:
                owner._buffers[last] = None
            else:
                del owner._buffers[last]


def _difference(one: Any, other: Any) -> str:
    """A path at which the second is not the first, or empty."""
    (mine, words), (theirs, other_words) = split(one), split(other)
    for path, tensor in mine.items():
        again = theirs.get(path)
        if again is None:
            return path
        if again is not tensor and not (
            (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
            and local(again).stride() == local(tensor).stride()
            and same_bits(local(again), local(tensor))
        ):
            return path
    return "" if words == other_words else "state"
