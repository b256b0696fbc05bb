"""What stages' modules must be like on a helper: weights and buffers by name, and how they stand in a step."""

from collections.abc import Sequence
from typing import Any

import torch

from swift.runtime.manifest import torch_dtype
from swift.runtime.tensors import dtype_name


def together(stages: Sequence[Any]) -> torch.nn.Module:
    """The modules of a rank's stages as one, whose names begin with the stage's."""
    return torch.nn.ModuleDict({f"stage{stage.stage_index}": stage.submod for stage in stages})


def tied(modules: Sequence[torch.nn.Module]) -> bool:
    """One of them has a parameter of another."""
    each = [id(parameter) for module in modules for parameter in module.parameters()]
    return len(set(each)) < len(each)


def named(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers: all that a forward reads and a step changes."""
    return [*module.named_parameters(), *module.named_buffers()]


def manifest(module: torch.nn.Module) -> list[list[Any]]:
    """Name, type, shape and strides of every tensor, as JSON. Kernels choose their way by strides."""
    return [[name, dtype_name(t), list(t.shape), list(t.stride())] for name, t in named(module)]


def difference(wanted: list[list[Any]], module: torch.nn.Module) -> str:
    """What the module has otherwise; empty: nothing."""
    here = manifest(module)
    for one, other in zip(wanted, here, strict=False):
        if one != other:
            return f"{_words(one)} there, {_words(other)} here"
    if len(wanted) != len(here):
        return f"{len(wanted)} parameters and buffers there, {len(here)} here"
    return ""


def _words(entry: list[Any]) -> str:
    name, dtype, shape, stride = entry
    return f"{name} {dtype}{shape} (strides {stride})"


def standing(module: torch.nn.Module) -> dict[str, Any]:
    """What a trainer may change between two steps: frozen parameters, parts in evaluation mode, autocast."""
    return {
        "frozen": [index for index, p in enumerate(module.parameters()) if not p.requires_grad],
        "evaluating": [index for index, part in enumerate(module.modules()) if not part.training],
        "autocast": [
            torch.is_autocast_enabled("cpu"),
            _dtype_name(torch.get_autocast_dtype("cpu")),
            torch.is_autocast_cache_enabled(),
        ],
    }


def stand(module: torch.nn.Module, as_there: dict[str, Any]) -> torch.autocast:
    """Makes it so here; the result is for the `with` around the computation."""
    frozen, evaluating = set(as_there["frozen"]), set(as_there["evaluating"])
    for index, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(index not in frozen)
    for index, part in enumerate(module.modules()):
        part.training = index not in evaluating
    enabled, dtype, cached = as_there["autocast"]
    return torch.autocast("cpu", dtype=torch_dtype(dtype), enabled=enabled, cache_enabled=cached)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
