"""The state that is saved, and the comparison that finds the losses of a format. Pure.

A state has a group of leaves for each kind of value that formats treat differently. A leaf is any value other than dict
and list: a tensor, an array, a number, a tuple. It is kept if the loaded leaf has the same type, dtype, shape, strides
and bits.
"""

import math
import os
import random
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

State = dict[str, Any]
Path = tuple[str, ...]

GROUPS: dict[str, Path] = {
    "bf16": ("model", "bf16"),
    "fp32": ("model", "fp32"),
    "int64": ("model", "int64"),
    "0-dim": ("model", "0-dim"),
    "strided": ("model", "strided"),
    "moments": ("optimizer", "state"),
    "numbers": ("optimizer", "param_groups"),
    "torch rng": ("rng", "torch"),
    "numpy rng": ("rng", "numpy"),
    "python rng": ("rng", "python"),
}
"""Path of each group. "moments" includes the optimizer's step tensors; "numbers" are those of its param_groups."""
GONE, TYPE, DTYPE, SHAPE, BITS, STRIDES = "gone", "type", "dtype", "shape", "bits", "strides"
LOSSES = (GONE, TYPE, DTYPE, SHAPE, BITS, STRIDES)
COLUMNS = 1024
_ROWS_MAX = 1024
"""Largest number of rows of a parameter, which then has 2 MiB in bf16, 4 MiB in fp32."""


def make(parameter_bytes: int, seed: int) -> State:
    """Creates about that many bytes of parameters, half of them in bf16, and for each the two moments of AdamW: three
    times the bytes in all."""
    generator = torch.Generator().manual_seed(seed)

    def parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        rows = max(1, parameter_bytes // 2 // (COLUMNS * dtype.itemsize))
        parts = math.ceil(rows / _ROWS_MAX)
        sizes = [rows // parts + (part < rows % parts) for part in range(parts)]
        return {
            f"{part}.weight": torch.randn(size, COLUMNS, generator=generator).to(dtype)
            for part, size in enumerate(sizes)
        }

    model: State = {
        "bf16": parameters(torch.bfloat16),
        "fp32": parameters(torch.float32),
        "int64": {"seen": torch.tensor([2**53 + 1, seed, -1])},
        "0-dim": {"scale": torch.tensor(math.pi)},
        "strided": {"table": torch.randn(3, 5, generator=generator).t()},
    }
    trained = [*model["bf16"].values(), *model["fp32"].values()]
    moments = {
        index: {
            "step": torch.tensor(7.0),
            "exp_avg": torch.randn(p.shape, generator=generator).to(p.dtype),
            "exp_avg_sq": torch.rand(p.shape, generator=generator).to(p.dtype),
        }
        for index, p in enumerate(trained)
    }
    groups = [
        {
            "lr": 0.1 + 0.2,
            "betas": (0.9, 0.95),
            "weight_decay": 0,
            "amsgrad": False,
            "foreach": None,
            "decoupled": "yes",
            "params": list(range(len(trained))),
        }
    ]
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": groups},
        "rng": {
            "torch": generator.get_state(),
            "numpy": np.random.RandomState(seed).get_state(),
            "python": random.Random(seed).getstate(),
        },
    }


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields every leaf with its path: keys and positions as text."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from leaves(item, (*path, str(key)))
    else:
        yield path, value


def nested(flat: dict[Path, Any]) -> State:
    """Returns nested dicts of the leaves that `leaves` yields."""
    state: State = {}
    for path, value in flat.items():
        place = state
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return state


def nbytes(state: State) -> int:
    """Returns the bytes of the state's tensors."""
    return sum(value.nbytes for _, value in leaves(state) if isinstance(value, torch.Tensor))


def losses(saved: State, loaded: State) -> dict[str, list[str]]:
    """Returns by group the kinds of losses (in the order of `LOSSES`); empty if all leaves are kept."""
    there = dict(leaves(loaded))
    found: dict[str, set[str]] = {group: set() for group in GROUPS}
    for path, value in leaves(saved):
        group = next(group for group, prefix in GROUPS.items() if path[: len(prefix)] == prefix)
        found[group] |= lost(value, there[path]) if path in there else {GONE}
    return {group: [what for what in LOSSES if what in of] for group, of in found.items()}


def lost(saved: Any, loaded: Any) -> set[str]:
    """Returns the kinds of losses of a leaf."""
    if type(saved) is not type(loaded):
        return {TYPE}
    if isinstance(saved, torch.Tensor):
        return _lost_of_tensor(saved, loaded)
    if isinstance(saved, np.ndarray):
        if saved.dtype != loaded.dtype:
            return {DTYPE}
        if saved.shape != loaded.shape:
            return {SHAPE}
        return set() if saved.tobytes() == loaded.tobytes() else {BITS}
    if isinstance(saved, tuple | list):
        if len(saved) != len(loaded):
            return {SHAPE}
        return set().union(*map(lost, saved, loaded))
    if isinstance(saved, float):
        return set() if struct.pack("d", saved) == struct.pack("d", loaded) else {BITS}
    return set() if saved == loaded else {BITS}


def _lost_of_tensor(saved: torch.Tensor, loaded: torch.Tensor) -> set[str]:
    if saved.shape != loaded.shape:
        return {SHAPE}
    found = set()
    if saved.dtype != loaded.dtype:
        found.add(DTYPE)
        loaded = loaded.to(saved.dtype)
    if not torch.equal(bytes_of(saved), bytes_of(loaded)):
        found.add(BITS)
    if saved.stride() != loaded.stride():
        found.add(STRIDES)
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in order as bytes; shares the tensor's memory if it is contiguous."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def write_tensors(path: FilePath, tensors: Iterable[torch.Tensor], *, fsync: bool) -> None:
    """Writes the bytes of tensors to one file: the least that a save can do. Raises OSError."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            left = memoryview(bytes_of(tensor).numpy().data)
            while left:
                left = left[file.write(left) :]
        if fsync:
            os.fsync(file)
