"""States into modules and optimizers, as they were saved: types, bits and strides.

torch's own loading is made for other purposes. An optimizer casts its state to the type of the parameter, whatever it
was; a module copies into the tensors that it has, whatever their strides. Both are followed (hooks, subclasses that
load in their own way), and what they have changed is put right, or refused.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from swift.checkpoint.state import split
from swift.errors import ServiceError, SwiftError, UsageError
from swift.optim.torch_names import state_left_alone
from swift.runtime.manifest import local
from swift.runtime.tensors import same_bits


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Whatever comes out of a trainer's own objects says whose it is. Raises ServiceError for what is no error of
    this project."""
    try:
        yield
    except SwiftError as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:
        raise ServiceError(f"{what} cannot load its state: {type(error).__name__}: {error}") from error


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Raises UsageError for an optimizer that cannot tell its state."""
    states = []
    for optimizer in optimizers:
        try:
            states.append(optimizer.state_dict())
        # super().__init__() was not called, or parameters changed under its state
        except (AttributeError, KeyError) as error:
            raise UsageError(
                f"{type(optimizer).__name__}.state_dict() fails ({type(error).__name__}: {error}): an optimizer "
                "calls super().__init__(), and its state is of the parameters in its groups"
            ) from error
    return states


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Raises ServiceError if its `state_dict` is not `saved` afterwards."""
    state, groups = optimizer.state, optimizer.param_groups
    try:
        with state_left_alone():
            optimizer.load_state_dict(saved)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ServiceError(f"{type(optimizer).__name__} does not take its state back: {error}") from error
    _keep_shared(optimizer, state, groups)
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


def _keep_shared(optimizer: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]]) -> None:
    """torch makes new ones of both. But a wrapper (SAM, Lookahead) shares its own with an optimizer inside of it."""
    sharing = [optimizer, *(v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer))]
    made, loaded = optimizer.state, optimizer.param_groups
    if made is not state:
        values = dict(made)
        state.clear()
        state.update(values)
    if loaded is not groups:
        for group, value in zip(groups, loaded, strict=False):
            group.clear()
            group.update(value)
        groups[:] = [*groups[: len(loaded)], *loaded[len(groups) :]]
    for each in sharing:  # some give it on by themselves
        if each.state is made:
            each.state = state
        if each.param_groups is loaded:
            each.param_groups = groups


def load_module(module: torch.nn.Module, saved: dict[str, Any], begun: Collection[str] | None = None) -> None:
    """Raises ServiceError if it has other parameters. `begun`: the buffers with which a process begins."""
    _make_buffers(module, saved, begun)
    for name, parameter in module.named_parameters():
        value = saved.get(name)
        if isinstance(value, torch.Tensor) and value.dtype != parameter.dtype:  # torch would cast it
            raise ServiceError(f"{name} is {value.dtype} in the state, and {parameter.dtype} in this process")
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
    """Those that a forward has made are made, those that it has not made yet go; others take the type and shape."""
    own = module.state_dict()
    for name, buffer in list(module.named_buffers()):
        value = saved.get(name)
        if type(value) is type(buffer) is torch.Tensor and _form(value) != _form(buffer):
            prefix, _, last = name.rpartition(".")
            module.get_submodule(prefix)._buffers[last] = torch.empty_like(value)
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


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


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
