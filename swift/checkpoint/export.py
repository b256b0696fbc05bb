"""A version of a whole job as one directory of `torch.distributed.checkpoint` (DCP).

::

    stages.<stage>.<name>           modules: once, however many replicas there are; shards are put together
    ranks.<rank>.<part>             the rest of what each rank has saved: optimizers, registered objects, …
    ranks.<rank>.same.<part>        the rank whose part is this one's, bit for bit; it is not written again
    version, world_size

A directory gets its name when all that is in it is durable and was read back.
"""

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from swift.checkpoint.dcp import Reader, alone, load_dcp
from swift.checkpoint.shard import elements, sync_folder
from swift.checkpoint.state import join, split
from swift.checkpoint.store import CheckpointStore
from swift.errors import ServiceError, UsageError

_SHARD = re.compile(r"S(?:hard)?\((?:dim=)?(\d+)\) (\d+)/(\d+) of (\[[0-9, ]*\])")
_WHOLE = "whole of "
_BATCH_BYTES = 256 << 20
"""Read back at once."""

State = dict[str, Any]


class Reading:
    """Whoever only loads."""

    fenced = False
    entered = 0


def load(directory: Path, version: int, world_size: int) -> list[State]:
    """What each rank has saved. ServiceError: of some rank it is not whole, or not what was saved."""
    return [CheckpointStore(directory, rank, Reading()).load(version) for rank in range(world_size)]


def world_size_of(directory: Path) -> int:
    """As many ranks as have saved something there."""
    numbers = [int(path.name[4:]) for path in directory.glob("v*/rank*") if path.name[4:].isdigit()]
    return max(numbers, default=-1) + 1


def assemble(states: Sequence[State]) -> State:
    """What is written, from what each rank has saved. UsageError: shards that cannot be put together."""
    wholes = list(_wholes(states))
    stages: dict[str, State] = {}
    ranks: dict[str, State] = {str(rank): {"same": {}} for rank in range(len(states))}
    digests: dict[tuple[str, ...], str] = {}
    firsts: dict[tuple[str, str], int] = {}
    for rank, state in enumerate(wholes):
        own = ranks[str(rank)]
        for key, module in state.pop("stages").items():
            for name, value in module.items():
                where, digest = (key, name), _digest(value)
                if digests.setdefault(where, digest) != digest:  # a buffer that replicas do not share
                    own.setdefault("stages", {}).setdefault(key, {})[name] = value
                else:
                    stages.setdefault(key, {}).setdefault(name, value)
        for part in sorted(state.keys() - {"version", "placements"}):
            first = firsts.setdefault((part, _digest(state[part])), rank)
            if first == rank:
                own[part] = state[part]
            else:
                own["same"][part] = first
    return {"version": states[0]["version"], "world_size": len(states), "stages": stages, "ranks": ranks}


def _wholes(states: Sequence[State]) -> Iterator[State]:
    """Each rank's state with what is sharded put together, once for all ranks that share it."""
    parts = [split(state) for state in states]
    made: dict[tuple[int, str], torch.Tensor] = {}
    for rank, ((tensors, skeleton), state) in enumerate(zip(parts, states, strict=True)):
        for path, words in state.get("placements", {}).items():
            if words.startswith(_WHOLE):
                continue
            match = _SHARD.fullmatch(words)
            if match is None:
                raise UsageError(
                    f"{path} of rank {rank} is {words}: only shards of one dimension are put together"
                )
            dimension, _number, count = map(int, match.groups()[:3])
            first = rank // count * count  # shards are numbered last
            if (first, path) not in made:
                shards = [parts[first + number][0][path] for number in range(count)]
                made[first, path] = torch.cat(shards, dimension)
            tensors[path] = made[first, path]
            if list(tensors[path].shape) != json.loads(match[4]):
                raise UsageError(
                    f"{path}: the shards of ranks {first} to {first + count - 1} are not {match[4]}"
                )
        yield join(skeleton, tensors)


def _digest(value: Any) -> str:
    tensors, skeleton = split(value)
    state = xxhash.xxh3_128(json.dumps(skeleton).encode())
    for tensor in tensors.values():
        state.update(elements(tensor))
    return state.hexdigest()


def write(target: Path, exported: State) -> int:
    """The bytes of its files. UsageError: it is there already, cannot be written, or was not read back as written."""
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} is there already: give another place")
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with alone():
            save(exported, storage_writer=FileSystemWriter(part, sync_files=True), no_dist=True)
        _check(part, exported)
        sync_folder(part)
        part.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}; give another place") from None
    except CheckpointException as error:  # no Exception
        why = "; ".join(str(cause) for cause, _trace in error.failures.values())
        raise UsageError(
            f"cannot write {target}: {' '.join(why.split())[:300]}; give another place"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sum(path.stat().st_size for path in target.iterdir())


def _check(directory: Path, exported: State) -> None:
    """Reads every tensor back, some at a time."""
    written = dict(_flat(exported))
    named = set(Reader(directory).read_metadata().state_dict_metadata)
    if lacking := written.keys() - named:
        raise UsageError(f"{directory} lacks {', '.join(sorted(lacking)[:3])}")
    names = sorted(written)
    while names:
        batch: dict[str, torch.Tensor] = {}
        while names and (not batch or sum(t.nbytes for t in batch.values()) < _BATCH_BYTES):
            name = names.pop()
            batch[name] = torch.empty(written[name].shape, dtype=written[name].dtype)
        load_dcp(batch, directory)
        for name, tensor in batch.items():
            if _digest(tensor) != _digest(written[name].contiguous()):
                raise UsageError(f"{directory}: {name} was not read back as it was written")


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by the names that DCP gives them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from _flat(item, f"{path}.{key}" if path else str(key))


def newest(directory: Path, world_size: int, said: Callable[[str], None]) -> tuple[int, list[State]]:
    """The newest version that is whole, and its states. `said(reason)`: why a newer one is not taken. ServiceError:
    there is none."""
    for version in reversed(CheckpointStore(directory, 0, Reading()).versions()):
        try:
            return version, load(directory, version, world_size)
        except ServiceError as error:
            said(f"version {version} is not taken: {error}")
    raise ServiceError(f"{directory} has no version that is whole for all of {world_size} ranks")


def size_of(exported: State) -> tuple[int, int]:
    """(tensors, their bytes)"""
    tensors = [tensor for _, tensor in _flat(exported)]
    return len(tensors), sum(tensor.nbytes for tensor in tensors)
