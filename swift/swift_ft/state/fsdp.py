"""Sharded state (FSDP2, tensor parallelism): parameters, gradients and optimizer state that are DTensors over meshes of
the session's or the trainer's own.

A rank's state is the part in its own process. So checkpoints, copies and digests hold local shards: plain tensors that
share the DTensors' memory. In addition they describe in words which shard each one is: `placements`. A state is loaded
only where the descriptions are equal, so that a shard never lands in another one's place.

Legend: R replicas, S shards; the mesh is [R, S].
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from swift_ft import torch_private
from swift_ft.comm.backend import Collectives
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.device import accelerator_in_use
from swift_ft.errors import ServiceError, UsageError
from swift_ft.optimizers import Lamb
from swift_ft.planner import Assignment
from swift_ft.state.tensors import summed
from swift_ft.state.transfer import local

# Optimizers whose steps take norms or products of whole matrices: collectives of torch's after the vote.
_COMMUNICATING = (Lamb, torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS)


def device_mesh(assignment: Assignment, groups: Mapping[str, ReconfigurableGroup]) -> DeviceMesh:
    """Returns the mesh of a stage, over groups that outlive their generation: "replicate", "shard" and "tensor", as
    many of them as have several ranks. Raises UsageError if a stage is one rank."""
    parts, tensor = assignment.shards, assignment.tensor
    sizes = {"replicate": assignment.replicas, "shard": parts // tensor, "tensor": tensor}
    if parts == 1:
        raise UsageError(
            "session.mesh needs shards or tensor_parallel: Session.from_env(shards=...), or leave FSDP2 out"
        )
    names = tuple(name for name, size in sizes.items() if size > 1)
    over: list[Any] = [
        groups["data" if name == "replicate" and name not in groups else name] for name in names
    ]
    accelerator = accelerator_in_use()
    device = "cpu" if accelerator is None else accelerator.torch.type
    if len(names) == 1:
        return DeviceMesh.from_group(over[0], device, mesh_dim_names=names)
    ranks = torch.tensor(assignment.group(groups["data"].ranks[0]))
    return DeviceMesh.from_group(
        over, device, mesh=ranks.view([sizes[name] for name in names]), mesh_dim_names=names
    )


def is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, DTensor)


def reduced_by_fsdp(
    module: torch.nn.Module, groups: Mapping[str, ReconfigurableGroup]
) -> list[torch.nn.Parameter]:
    """Returns the stage's parameters that FSDP2 shards, and whose gradients it reduces.

    Raises UsageError for a mesh whose groups end with a generation, and for other DTensors over ranks with batches of
    their own, whose gradients nothing averages.
    """
    reduced = _managed(module)
    lasting = {each for group in groups.values() for each in group.with_parts()}
    together = set(groups["tensor"].ranks if "tensor" in groups else ())
    for name, parameter in module.named_parameters():
        if not is_sharded(parameter):
            continue
        over = parameter.device_mesh.get_all_groups()  # type: ignore[attr-defined]
        if not lasting.issuperset(over):
            raise UsageError(
                f"{name} is sharded over a mesh that is not rebuilt after a failure; make it after the session, or use "
                "session.mesh"
            )
        apart = [group for group in over if len(group.ranks) > 1 and not together.issuperset(group.ranks)]
        if apart and parameter not in reduced:
            raise UsageError(
                f"{name} is a DTensor over ranks that train on batches of their own, and no fully_shard averages its "
                "gradient; if these ranks compute one batch together, say so: Session.from_env(tensor_parallel=...)"
            )
    return list(reduced)


def _managed(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    if torch_private.RESETS_SHARDED:
        return torch_private.sharded_by_fsdp(module)
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise UsageError(
            f"torch {torch.__version__} lacks FSDPModule.reset_iter_state, without which a step with FSDP2 that a "
            "failure cut short cannot be taken back: install torch 2.13 or later, or leave FSDP2 out"
        )
    return set()


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError for a step that communicates over shards: after the vote each rank must finish alone."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if isinstance(optimizer, _COMMUNICATING) and any(is_sharded(p) for p in parameters):
        raise UsageError(
            f"{type(optimizer).__name__} over sharded parameters communicates in its step, where a failure could "
            "not be undone; use an element-wise optimizer (AdamW, SGD, ...)"
        )


def broadcast(group: ReconfigurableGroup, tensors: Iterable[torch.Tensor]) -> None:
    """Broadcasts the first rank's values to all ranks of `group`, bit for bit."""
    kept = [tensor for tensor in tensors if tensor.numel()]

    def run(collectives: Collectives) -> None:
        for tensor in kept:
            collectives.broadcast(tensor, 0)

    group.run(run)


# --- states ---


def placement(tensor: Any) -> str:
    """Describes the shard that `local` returns; empty for an unsharded tensor. Raises UsageError for partial sums.

    ``S(0) 1/2 by 4, R on shard×tensor of [8, 6]``: for each dimension of the mesh, R if all have the same, else the
    tensor's dimension, which of its parts this is, and how many ranks further the next one is.
    """
    if not hasattr(tensor, "to_local"):
        return ""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    words = []
    for dimension, kind in enumerate(tensor.placements):
        if kind.is_partial():
            raise UsageError("a state holds partial sums (DTensor with Partial()); redistribute them first")
        if kind.is_replicate():
            words.append("R")
            continue
        split = getattr(kind, "split_factor", None)  # FSDP's shard of a tensor-parallel one's
        word = f"S({kind.dim})" if split is None else f"_S({kind.dim}/{split})"
        words.append(
            f"{word} {coordinate[dimension] + 1}/{mesh.size(dimension)} by {_apart(mesh, dimension)}"
        )
    return f"{', '.join(words)} on {'×'.join(mesh.mesh_dim_names or ()) or 'a mesh'} of {list(tensor.shape)}"


def _apart(mesh: Any, dimension: int) -> int:
    """Returns how many ranks lie between neighbours along this dimension of the mesh."""
    if mesh.size(dimension) == 1:
        return 1
    row = mesh.mesh.movedim(dimension, 0).flatten(1)[:, 0] if mesh.ndim > 1 else mesh.mesh
    return int(row[1] - row[0])


def localized(state: Any) -> tuple[Any, dict[str, str]]:
    """Returns (`state` with each DTensor replaced by its local part, which shares its memory; placements by path).

    Paths are those of swift_ft.state.tree.
    """
    words: dict[str, str] = {}

    def change(at: str, tensor: torch.Tensor) -> torch.Tensor:
        if not is_sharded(tensor):
            return tensor
        words[at] = placement(tensor)
        return local(tensor)

    plain = _changed(state, "state", change)
    return (plain, words) if words else (state, words)


def globalized(state: Any, words: Mapping[str, str], like: Iterable[torch.Tensor]) -> Any:
    """Inverts `localized`: tensors named in `words` become shards again, on the mesh of the parameters `like`.

    Raises ServiceError if none of these parameters has the same shard of its own tensor.
    """
    if not words:
        return state
    templates: dict[str, Any] = {}
    meshes: dict[str, Any] = {}
    for parameter in like:
        if is_sharded(parameter):
            shard = _shard(placement(parameter))
            templates.setdefault(shard, parameter)
            meshes.setdefault(_mesh(shard), parameter)

    def change(at: str, tensor: torch.Tensor) -> torch.Tensor:
        if at not in words:
            return tensor
        shard = _shard(words[at])
        if shard in templates:
            template = templates[shard]
            placements = template.placements
        elif "S(" not in shard and _mesh(shard) in meshes:  # the same on all ranks of its mesh
            template = meshes[_mesh(shard)]
            placements = [Replicate()] * len(template.placements)
        else:
            raise ServiceError(f"the state at {at} is {words[at]}; this rank holds {'; '.join(templates)}")
        shape = torch.Size(json.loads(words[at].rpartition(" of ")[2]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor, template.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return _changed(state, "state", change)


def check_placements(own: Mapping[str, str], given: Mapping[str, str], prefix: str) -> None:
    """Raises ServiceError unless both have the same placement for every path that begins with `prefix`."""
    for path in sorted({*own, *given}):
        if path.startswith(prefix) and own.get(path) != given.get(path):
            raise ServiceError(
                f"the state at {path} is {given.get(path, 'not sharded')}, this rank holds "
                f"{own.get(path, 'it unsharded')}"
            )


def _shard(words: str) -> str:
    return words.rpartition(" of ")[0]


def _mesh(shard: str) -> str:
    return shard.rpartition(" on ")[2]


def _changed(value: Any, path: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: _changed(item, f"{path}.{key}", change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_changed(item, f"{path}.{i}", change) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


# --- gradients ---


def lay_out(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sums gradients that are partial sums over the ranks of a tensor-parallel layer, so that the optimizer's step has
    nothing to communicate: after the vote each rank must finish alone."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        placements = getattr(parameter, "placements", None)
        if placements is not None and is_sharded(gradient) and gradient.placements != placements:
            parameter.grad = gradient.redistribute(placements=placements)


def norm_over_shards(
    parameters: Iterable[torch.nn.Parameter], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Returns the contribution (see `part_of_norm`) of the gradients of sharded parameters, each counted once over the
    ranks of its mesh. All ranks of these meshes call it with the same parameters."""
    kinds: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    for parameter in parameters:
        if is_sharded(parameter):
            of_kind = kinds.setdefault((parameter.device_mesh, parameter.placements), [])  # type: ignore[attr-defined]
            if parameter.grad is not None:
                of_kind.append(local(parameter.grad))
    infinite = norm_type == float("inf")
    whole = torch.zeros((), device=device)
    for (mesh, placements), gradients in kinds.items():
        part = part_of_norm(gradients, norm_type, device)
        for dimension, placement_there in enumerate(placements):
            if not placement_there.is_replicate():
                parts = mesh.get_group(dimension).gathered(part)
                part = torch.stack(parts).max() if infinite else summed(parts)
        whole = torch.maximum(whole, part) if infinite else whole + part
    return whole


def stand_in(parameter: Any) -> Any:
    """Returns the local parts of a sharded parameter and its gradient, sharing their memory; others unchanged."""
    if not is_sharded(parameter):
        return parameter
    plain = torch.nn.Parameter(local(parameter), requires_grad=False)
    if parameter.grad is not None:
        plain.grad = local(parameter.grad)
    return plain


def part_of_norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Returns these gradients' contribution to the total norm: the sum of their powers, or their maximum. fp32 [], on
    `device`, where they are."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)  # torch's is on the CPU
    norm = torch.nn.utils.get_total_norm(grads, norm_type).float()
    return norm if norm_type == float("inf") else norm**norm_type
