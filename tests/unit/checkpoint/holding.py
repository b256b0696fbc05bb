"""What a `CheckpointStore` asks of the process that it belongs to; and versions that such processes have saved."""

from pathlib import Path
from typing import Any

import torch

from swift_ft.state.checkpoint_place import Place
from swift_ft.state.checkpoint_store import CheckpointStore, Unsaved


class Holding:
    """It holds its rank, in some generation."""

    def __init__(self, *, fenced: bool = False, entered: int = 0) -> None:
        self.fenced = fenced
        self.entered = entered


def unexpected(unsaved: Unsaved) -> None:
    """(of a save that is expected to work)"""
    raise AssertionError(unsaved.reason)


def store_of(
    where: str | Path | Place, rank: int = 0, *, generation: int = 0, twins: tuple[int, ...] = ()
) -> CheckpointStore:
    """Of a process that has entered this generation."""
    return CheckpointStore(where, rank, Holding(entered=generation), twins=twins)


def keep(store: CheckpointStore, version: int, state: Any) -> CheckpointStore:
    """It has saved this version."""
    store.save(version, state, lambda _version: None, unexpected)
    store.wait()
    return store


def saved(
    where: str | Path | Place, version: int, state: Any, rank: int = 0, *, generation: int = 1
) -> CheckpointStore:
    return keep(store_of(where, rank, generation=generation), version, state)


def shard_of(directory: Path, state: Any, generation: int = 1, version: int = 1) -> Path:
    """The folder of rank 0's version, by another process."""
    process = saved(directory, version, state, generation=generation)._process
    (shard,) = directory.glob(f"v{version:08d}/rank0/g{generation}-{process}-*")
    return shard


def load(where: str | Path | Place, version: int, rank: int = 0) -> Any:
    """By another process."""
    return store_of(where, rank).load(version)


def _bits(value: Any) -> bytes:
    return bytes(value.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def same(a: Any, b: Any) -> bool:
    """In every bit and type, and in the order of keys."""
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, _bits(a)) == (b.dtype, b.shape, _bits(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return (type(a), repr(a)) == (type(b), repr(b))
