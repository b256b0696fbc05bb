"""A version of a whole job as one directory of `torch.distributed.checkpoint` (DCP).

::

    stages.<stage>.<name>           modules: once, for any number of replicas; shards are combined
    ranks.<rank>.<part>             the rest of each rank's state: optimizers, registered objects, …
    ranks.<rank>.same.<part>        the rank with the same part, bit for bit; it is not written again
    version, world_size

A directory gets its final name once its content is durable and has been read back.
"""

import io
import math
import os
import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import open_regular, read_regular, sync_directory
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.digests import digest_of
from swift_ft.state.tree import join, split
from swift_ft.text import listed

# Reading of directories of `torch.distributed.checkpoint` (DCP) without running code that they contain.
#
# DCP's index, the file ``.metadata``, is a pickle, and torch unpickles it without restrictions. Here it may only name
# DCP's own data classes, and may only change the objects that it creates. The content of its other files goes through
# torch's `weights_only` unpickler. Only files of the directory itself are read.

METADATA = ".metadata"
METADATA_BYTES_MAX = 256 << 20


def _size(*values: Any) -> torch.Size:
    return torch.Size(*values)


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"the layout {name[:40]!r}")
    return torch.strided


_DATA = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    filesystem._StorageInfo,
)
"""Classes whose objects the file may create and change: these belong to the caller that loads it."""
_NAMED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        **{(cls.__module__, cls.__qualname__): cls for cls in (*_DATA, metadata._MEM_FORMAT_ENCODING)},
        **{
            ("torch", str(dtype).removeprefix("torch.")): dtype
            for dtype in vars(torch).values()
            if isinstance(dtype, torch.dtype)
        },
        ("torch", "Size"): _size,
        ("torch.serialization", "_get_layout"): _layout,
        # The directory in which it was written; it is not used.
        ("pathlib", "PosixPath"): PurePath,
        ("pathlib", "WindowsPath"): PurePath,
        ("pathlib._local", "PosixPath"): PurePath,
        ("pathlib._local", "WindowsPath"): PurePath,
    }
)


class _Unpickler(pickle._Unpickler):
    """An unpickler that finds only the names that DCP uses, and sets attributes only on DCP's data objects. The names
    refer to the process's own classes, which a file must not change. (Python's pickle; the one in C has no hook here.)
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}") from None

    def load_build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if type(target) not in _DATA:
            raise pickle.UnpicklingError(f"it gives attributes to {str(target)[:80]}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


class _Files(filesystem.FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with os.fdopen(open_regular(Path(path), os.O_RDONLY), mode) as file:
            yield cast(io.IOBase, file)


class Reader(filesystem.FileSystemReader):
    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(directory)
        self.fs = _Files()

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Returns the index. Raises UsageError if there is none, or if it contains anything that DCP does not write."""
        path = Path(self.path) / METADATA
        try:
            content = read_regular(path, METADATA_BYTES_MAX)
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror}; name a directory that torch.distributed.checkpoint has written"
            ) from None
        if len(content) > METADATA_BYTES_MAX:
            raise UsageError(f"{path} has more than {METADATA_BYTES_MAX} bytes")
        found = _unpickled(content, path)
        for info in found.storage_data.values():
            name = getattr(info, "relative_path", None)
            if not isinstance(name, str) or not _is_plain(name) or (path.parent / name).is_symlink():
                raise UsageError(f"{path} names a file outside of its directory: {str(name)[:80]!r}")
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and Path(name).name == name and "\0" not in name


def _unpickled(content: bytes, path: Path) -> metadata.Metadata:
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001  (whatever a stranger's bytes lead to)
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"{path} is not what torch.distributed.checkpoint writes: {why}") from None
    if not isinstance(found, metadata.Metadata) or not isinstance(getattr(found, "storage_data", None), dict):
        raise UsageError(f"{path} is not what torch.distributed.checkpoint writes for a directory of files")
    return found


class _Planner(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        """Returns DCP's plan. Raises ValueError if the directory lacks a part of a requested tensor: torch would load
        the rest without an error."""
        plan = super().create_local_plan()
        assert self.metadata is not None
        for name, wanted in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            if isinstance(saved, metadata.TensorStorageMetadata):
                if not _fill(saved.chunks, saved.size):
                    raise ValueError(f"the chunks of {name} do not make a tensor of {list(saved.size)}")
            elif isinstance(wanted, torch.Tensor):
                raise ValueError(f"{name} is no tensor there")
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # torch unpickles only this re-saved copy
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _fill(chunks: Sequence[metadata.ChunkStorageMetadata], size: torch.Size) -> bool:
    """Returns whether every element of a tensor is in exactly one of its chunks: they lie inside of it, have as many
    elements, and do not overlap."""
    for chunk in chunks:
        for at, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True):
            if at < 0 or length < 0 or at + length > whole:
                return False
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        return False
    boxes = [[range(at, at + n) for at, n in zip(c.offsets, c.sizes)] for c in chunks if math.prod(c.sizes)]
    return len(boxes) < 2 or not _overlap(boxes, len(size))


def _overlap(boxes: Sequence[Sequence[range]], dimensions: int) -> bool:
    """Goes along the dimension with most offsets, so that each box is compared only with those beside it."""
    along = max(range(dimensions), key=lambda at: len({box[at].start for box in boxes}))
    beside: list[Sequence[range]] = []
    for box in sorted(boxes, key=lambda box: box[along].start):
        beside = [other for other in beside if other[along].stop > box[along].start]
        if any(all(map(_meet, box, other)) for other in beside):
            return True
        beside.append(box)
    return False


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def load_dcp(state_dict: dict[str, Any], directory: str | os.PathLike[str]) -> None:
    """Loads into `state_dict` what `torch.distributed.checkpoint.save` has written. It works as torch's `load`, but in
    this process alone (also within a session), and unpickles only tensors and plain values.

    (a trainer, before its first step) For a run that was begun without swift-ft. `state_dict`: nested dicts whose
    tensors are filled in place, each DTensor with its shard; other values are replaced. Raises UsageError if DCP has
    not written the directory, if it lacks a key, or if it contains other values than tensors and plain ones.
    """
    reader = Reader(directory)
    reader.read_metadata()
    try:
        with alone():
            load(state_dict, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as error:  # not a subclass of Exception
        why = "; ".join(str(cause) for cause, _trace in error.failures.values())
        raise UsageError(f"{os.fspath(directory)} cannot be loaded: {' '.join(why.split())[:300]}") from error


@contextmanager
def alone() -> Iterator[None]:
    """Suppresses torch's warning about loading or saving in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


_NUMBER = "([1-9][0-9]{0,8})"
_PART = re.compile(rf"(_?)S\(([0-9]{{1,9}})(?:/[0-9]{{1,9}})?\) {_NUMBER}/{_NUMBER} by {_NUMBER}", re.ASCII)
_PLACED = re.compile(r"(.{1,400}?) on [^ ]{1,200}(?: mesh)? of (\[[0-9, ]{0,200}\])")
_BATCH_BYTES = 256 << 20
"""Bytes that are read back at once."""

State = dict[str, Any]


class Reading:
    """A `Holder` for a process that only loads."""

    fenced = False
    entered = 0


def load_states(directory: str, version: int, world_size: int) -> list[State]:
    """Returns each rank's state. `directory`: or a URL. Raises ServiceError if one is incomplete or corrupt."""
    return [_load(directory, version, rank) for rank in range(world_size)]


def _load(directory: str, version: int, rank: int) -> State:
    state: State = CheckpointStore(directory, rank, Reading()).load(version)
    if not (
        _is_dict_of(object, state)
        and type(state.get("version")) is int
        and state["version"] == version
        and _is_dict_of(dict, state.get("stages"))
        and all(_is_dict_of(object, module) for module in state["stages"].values())
        and _is_dict_of(str, state.get("placements", {}))
    ):
        raise ServiceError(f"version {version} of rank {rank} in {directory} is not the state of a rank")
    return state


def _is_dict_of(kind: type, value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(item, kind) for name, item in value.items()
    )


def world_size_of(directory: str) -> int:
    """Returns the number of ranks, from the highest rank that has saved there. `directory`: or a URL. Raises
    ServiceError."""
    try:
        return max(CheckpointStore(directory, 0, Reading()).ranks(), default=-1) + 1
    except OSError as error:
        raise ServiceError(f"{directory} cannot be read: {error.strerror}") from None


def assemble(states: Sequence[State]) -> State:
    """Builds the content of the directory from the ranks' states. Raises UsageError if shards cannot be combined."""
    wholes = list(_wholes(states))
    stages: dict[str, State] = {}
    ranks: dict[str, State] = {str(rank): {"same": {}} for rank in range(len(states))}
    digests: dict[tuple[str, ...], bytes] = {}
    firsts: dict[tuple[str, bytes], int] = {}
    for rank, state in enumerate(wholes):
        own = ranks[str(rank)]
        for key, module in state.pop("stages").items():
            for name, value in module.items():
                where, digest = (key, name), digest_of(value)
                if digests.setdefault(where, digest) != digest:  # a buffer that differs between replicas
                    own.setdefault("stages", {}).setdefault(key, {})[name] = value
                else:
                    stages.setdefault(key, {}).setdefault(name, value)
        for part in sorted(state.keys() - {"version", "placements"}):
            first = firsts.setdefault((part, digest_of(state[part])), rank)
            if first == rank:
                own[part] = state[part]
            else:
                own["same"][part] = first
    return {"version": states[0]["version"], "world_size": len(states), "stages": stages, "ranks": ranks}


class _Part(NamedTuple):
    """A rank's part of a tensor along one dimension of a mesh (`swift_ft.state.fsdp.placement`)."""

    nested: bool
    """It is a part of what the other dimensions of the mesh leave to this rank."""
    dimension: int
    number: int
    of: int
    apart: int


def _parts(words: str) -> tuple[list[_Part], str]:
    """Returns a shard's parts and the whole tensor's shape. Raises ValueError."""
    placed = _PLACED.fullmatch(words)
    if placed is None:
        raise ValueError("not a placement")
    found = []
    for word in placed[1].split(", "):
        if word == "R":
            continue
        match = _PART.fullmatch(word)
        if match is None:
            raise ValueError("not a part")
        nested, *numbers = match.groups()
        found.append(_Part(bool(nested), *map(int, numbers)))
    return found, placed[2]


def _wholes(states: Sequence[State]) -> Iterator[State]:
    """Yields each rank's state with its shards combined, once for all ranks that share a tensor."""
    split_states = [split(state) for state in states]
    made: dict[tuple[int, str], torch.Tensor] = {}

    def whole(path: str, rank: int, parts: Sequence[_Part]) -> torch.Tensor:
        """Returns what ranks hold together along these dimensions. Raises KeyError, ValueError, RuntimeError."""
        if not parts:
            return split_states[rank][0][path]
        part = next((each for each in parts if not each.nested), parts[0])
        others = [each for each in parts if each is not part]
        first = rank - (part.number - 1) * part.apart
        ranks = range(first, first + part.of * part.apart, part.apart)
        if first < 0 or ranks[-1] >= len(states):
            raise ValueError(f"a part is missing: there is no rank {ranks[-1]}")
        pieces = []
        for number, other in enumerate(ranks, start=1):
            if part._replace(number=number) not in _parts(states[other]["placements"][path])[0]:
                raise ValueError(f"rank {other} does not hold part {number}")
            pieces.append(whole(path, other, others))
        return torch.cat(pieces, part.dimension)

    for rank, ((tensors, skeleton), state) in enumerate(zip(split_states, states, strict=True)):
        combined = {}
        for path, words in state.get("placements", {}).items():
            try:
                parts, shape = _parts(words)
                if not parts:
                    continue
                first = rank - sum((part.number - 1) * part.apart for part in parts)
                if (first, path) not in made:
                    made[first, path] = whole(path, rank, parts)
                combined[path] = made[first, path]
            except KeyError:
                raise UsageError(
                    f"the shards of {path[:80]} cannot be put together: a rank lacks its own"
                ) from None
            except (ValueError, IndexError, RuntimeError) as error:
                why = " ".join(str(error).split())[:200]
                raise UsageError(
                    f"{path[:80]} of rank {rank}, {words[:80]}, cannot be put together: {why}"
                ) from None
            if str(list(combined[path].shape)) != shape:
                raise UsageError(f"{path[:80]} of rank {rank}: its shards together are not {shape[:80]}")
        yield join(skeleton, {**tensors, **combined})


def write_dcp(target: Path, exported: State) -> int:
    """Writes the directory. Returns its files' bytes. Raises UsageError if it exists, cannot be written, or was not
    read back as written."""
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} is there already: give another place")
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        part.mkdir(mode=0o700)
        with alone():
            save(exported, storage_writer=FileSystemWriter(part, sync_files=True), no_dist=True)
        for path in part.iterdir():  # torch creates them with the umask's permissions
            path.chmod(0o600)
        _check(part, exported)
        sync_directory(part)
        part.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}; give another place") from None
    except CheckpointException as error:  # not a subclass of Exception
        why = "; ".join(str(cause) for cause, _trace in error.failures.values())
        raise UsageError(
            f"cannot write {target}: {' '.join(why.split())[:300]}; give another place"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sum(path.stat().st_size for path in target.iterdir())


def _check(directory: Path, exported: State) -> None:
    """Reads every tensor back in batches. Raises UsageError if one differs."""
    written = dict(_flat(exported))
    named = set(Reader(directory).read_metadata().state_dict_metadata)
    if lacking := written.keys() - named:
        raise UsageError(f"{directory} lacks {listed(sorted(lacking))}")
    names = sorted(written)
    while names:
        batch: dict[str, torch.Tensor] = {}
        while names and (not batch or sum(t.nbytes for t in batch.values()) < _BATCH_BYTES):
            name = names.pop()
            batch[name] = torch.empty(written[name].shape, dtype=written[name].dtype)
        load_dcp(batch, directory)
        for name, tensor in batch.items():
            if digest_of(tensor) != digest_of(written[name].contiguous()):
                raise UsageError(f"{directory}: {name} was not read back as it was written")


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors by the names that DCP gives them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from _flat(item, f"{path}.{key}" if path else str(key))


def newest(directory: str, world_size: int, said: Callable[[str], None]) -> tuple[int, list[State]]:
    """Returns the newest complete version and its states. `said(reason)`: called for each newer one that is skipped.
    Raises ServiceError if there is none."""
    for version in reversed(CheckpointStore(directory, 0, Reading()).versions()):
        try:
            return version, load_states(directory, version, world_size)
        except ServiceError as error:
            said(f"version {version} is not taken: {error}")
    raise ServiceError(f"{directory} has no version that is whole for all of {world_size} ranks")


def size_of(exported: State) -> tuple[int, int]:
    tensors = [tensor for _, tensor in _flat(exported)]
    return len(tensors), sum(tensor.nbytes for tensor in tensors)
