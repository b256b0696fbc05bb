"""What a state consists of, told from one replica to another, and how its bytes are cut into chunks.

A manifest is JSON: the state's skeleton (swift.checkpoint.state) and, in the skeleton's order, one entry per tensor.
Tensors that are the same memory (tied weights) are sent once. Sharded tensors (FSDP2) are entries of their local
shard; `placement` says in words which shard of what it is, without naming a mesh or a rank, so that replicas of one
shard have equal manifests and everybody else has not.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from swift.checkpoint.state import split, stride_told
from swift.errors import ReplicaDiffers, UsageError
from swift.runtime.tensors import dtype_name

# Bytes. From 4 MiB on a message moves at a raw socket's speed, one of 1 MiB at half of it.
CHUNK_BYTES_MAX = 8 << 20
CHUNK_BYTES_MIN = 64 << 10
# So many times its own bytes a tensor may lie spread over.
_REACH_MAX = 1 << 10
_STRIDE_MAX = (1 << 63) - 1  # torch's
# A state is cut so that every source has about this many chunks, as far as the two bounds allow.
_CHUNKS_PER_SOURCE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor. `shape` is that of the local shard, `placement` is empty if the tensor is not sharded.

    `same_as` is the path of the earlier tensor whose memory this one is, or empty. `stride` is empty for the usual
    strides; the bytes come in the order of the indices all the same.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    placement: str
    same_as: str
    stride: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return 0 if self.same_as else math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f" ({self.placement})" if self.placement else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A state at one version: its skeleton, and the tensors in the skeleton's order."""

    version: int
    skeleton: Any
    entries: tuple[TensorEntry, ...]

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "version": self.version,
                "skeleton": self.skeleton,
                "entries": [asdict(entry) for entry in self.entries],
            },
            sort_keys=True,
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Raises ValueError for what `to_bytes` does not make: nothing is allocated on a peer's word alone."""
        try:
            value = json.loads(data)
            entries = tuple(
                TensorEntry(**{**fields, "shape": tuple(fields["shape"]), "stride": tuple(fields["stride"])})
                for fields in value["entries"]
            )
            version, skeleton = value["version"], value["skeleton"]
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        _check_entries(entries)
        if type(version) is not int or version < 0:
            raise ValueError(f"version {version!r}")
        return cls(version=version, skeleton=skeleton, entries=entries)


def _check_entries(entries: Sequence[TensorEntry]) -> None:
    known: dict[str, TensorEntry] = {}
    for entry in entries:
        if not all(isinstance(v, str) for v in (entry.path, entry.dtype, entry.placement, entry.same_as)):
            raise ValueError("an entry's fields have other types")
        if entry.path in known:
            raise ValueError(f"{entry.path} comes twice")
        if any(type(size) is not int or size < 0 for size in entry.shape):
            raise ValueError(f"{entry.path} has the shape {list(entry.shape)}")
        torch_dtype(entry.dtype)
        _check_stride(entry)
        if entry.same_as:
            other = known.get(entry.same_as)
            alike = other is not None and (other.dtype, other.shape, other.stride) == (
                entry.dtype,
                entry.shape,
                entry.stride,
            )
            if other is None or other.same_as or not alike:
                raise ValueError(f"{entry.path} is said to be {entry.same_as}")
        known[entry.path] = entry


def _check_stride(entry: TensorEntry) -> None:
    """`split` tells strides of tensors whose elements are apart; in so much memory at most (slices of bigger ones)."""
    if not entry.stride:
        return
    if len(entry.stride) != len(entry.shape) or any(type(s) is not int or s < 0 for s in entry.stride):
        raise ValueError(f"{entry.path} has the strides {list(entry.stride)}")
    numel = math.prod(entry.shape)
    if not numel and max(entry.stride) <= _STRIDE_MAX:
        return  # an empty tensor reaches nothing, whatever its strides
    reach = sum((size - 1) * stride for size, stride in zip(entry.shape, entry.stride, strict=True) if size)
    if reach > _REACH_MAX * max(numel, 1):
        raise ValueError(f"{entry.path} has the strides {list(entry.stride)}")


def torch_dtype(name: str) -> torch.dtype:
    """Raises ValueError for a name that is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies in this process, without its gradient history: itself unless sharded."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)  # asked, not imported: DTensor costs what few states need
    return tensor if to_local is None else to_local().detach()


def placement(tensor: Any) -> str:
    """Which shard of what `local` gives; empty for a tensor that is not sharded. Raises UsageError for partial sums."""
    if not hasattr(tensor, "to_local"):
        return ""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    words = []
    for dimension, kind in enumerate(tensor.placements):
        if kind.is_partial():
            raise UsageError("a state holds partial sums (DTensor with Partial()); redistribute them first")
        if not kind.is_replicate():
            words.append(f"{kind} {coordinate[dimension] + 1}/{mesh.size(dimension)}")
    return f"{', '.join(words) or 'whole'} of {list(tensor.shape)}"


def _check_dense(path: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UsageError(f"the state at {path} is a {tensor.layout} tensor on {tensor.device}; keep it dense")


def entry_of(path: str, tensor: torch.Tensor, same_as: str = "") -> TensorEntry:
    return TensorEntry(
        path=path,
        dtype=dtype_name(tensor),
        shape=tuple(local(tensor).shape),
        placement=placement(tensor),
        same_as=same_as,
        stride=tuple(stride_told(local(tensor))),
    )


def manifest_of(state: dict[str, Any], version: int) -> tuple[Manifest, list[torch.Tensor]]:
    """(manifest, local tensors in its order)."""
    tensors, skeleton = split(state)
    entries: list[TensorEntry] = []
    parts: list[torch.Tensor] = []
    seen: dict[Any, str] = {}
    for path, tensor in tensors.items():
        _check_dense(path, tensor)
        part = local(tensor)
        memory = (part.data_ptr(), part.dtype, part.shape, part.stride(), placement(tensor))
        first = seen.setdefault(memory, path) if part.numel() else path
        entries.append(entry_of(path, tensor, "" if first == path else first))
        parts.append(part)
    version = int(state.get("version", version))
    return Manifest(version=version, skeleton=skeleton, entries=tuple(entries)), parts


def first_difference(one: Manifest, other: Manifest) -> str:
    """The first path at which two manifests are not equal, for the message."""
    mine, theirs = ({entry.path: entry for entry in manifest.entries} for manifest in (one, other))
    for path, entry in mine.items():
        if theirs.get(path) != entry:
            return path
    for path in theirs:
        if path not in mine:
            return path
    return _first_difference(one.skeleton, other.skeleton, "state") or "state.version"


def _first_difference(one: Any, other: Any, path: str) -> str:
    if json.dumps(one) == json.dumps(other):
        return ""
    if not (isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys()):
        return path
    for kind in one:  # "dict", "list" or "tuple"; tensors have been compared
        mine, theirs = one[kind], other[kind]
        if kind == "dict":
            pairs = [(str(a[0]), a[1], b[1]) for a, b in zip(mine, theirs) if a[0] == b[0]]
        elif isinstance(mine, list):
            pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(mine, theirs))]
        else:
            pairs = []
        for name, a, b in pairs:
            if difference := _first_difference(a, b, f"{path}.{name}"):
                return difference
    return path


# --- chunks ---


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of the tensor of that index."""

    tensor: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one operation moves: a piece of a big tensor as it lies in memory, or many small tensors packed."""

    index: int
    source: int  # index into the transfer's sources
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)


def plan_chunks(sizes: Sequence[int], sources: int) -> list[Chunk]:
    """Every byte of tensors of `sizes` bytes exactly once, over `sources` sources by turns. Deterministic."""
    limit = min(max(sum(sizes) // (sources * _CHUNKS_PER_SOURCE), CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
    chunks: list[tuple[Piece, ...]] = []
    pack: list[Piece] = []
    packed = 0
    for tensor, size in enumerate(sizes):
        if size == 0:
            continue
        if size * 4 > limit:  # a copy into a pack would cost more than an operation of its own
            parts = -(-size // limit)
            cuts = [size * part // parts for part in range(parts + 1)]
            chunks.extend((Piece(tensor, begin, end),) for begin, end in itertools.pairwise(cuts))
            continue
        if packed + size > limit:
            chunks.append(tuple(pack))
            pack, packed = [], 0
        pack.append(Piece(tensor, 0, size))
        packed += size
    if pack:
        chunks.append(tuple(pack))
    return [Chunk(index, index % sources, pieces) for index, pieces in enumerate(chunks)]


def fits(entry: TensorEntry, destination: torch.Tensor) -> bool:
    expected = entry_of(entry.path, destination)
    return (entry.dtype, entry.shape, entry.placement) == (expected.dtype, expected.shape, expected.placement)


def check_fits(entry: TensorEntry, destination: torch.Tensor, source: int, joiner: int) -> None:
    """Raises ReplicaDiffers, in one line, if a tensor of that entry cannot be received into `destination`."""
    if not fits(entry, destination):
        expected = entry_of(entry.path, destination)
        raise ReplicaDiffers(
            f"{entry.path}: rank {source} holds {entry}, rank {joiner} has room for {expected}"
        )
