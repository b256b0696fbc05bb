"""Copies a replica's state to a joining rank, bit for bit.

(source) ``send_state``: header (also says whether the log has all of this rank's records), manifest, its share of the
chunks, digests of every piece of the whole state
(joiner) ``receive_state``: manifests of all sources compared, chunks, digests of all sources compared with each other
and with the received bytes

Every source sends the digests of the whole state although it sends only its share of the bytes. So replicas that have
diverged are detected before the joiner resumes from a mixture of them. Bytes go from the source's tensors into the
joiner's without an intermediate copy, with two exceptions. Small tensors are packed. A tensor whose memory is not one
contiguous run of bytes goes through a contiguous copy. A device's bytes are sent from the device and received there: it
is up to the wire how.

The payload uses the backend's point-to-point operations. With chunks of 4 MiB and more, several in flight, they reach a
raw TCP socket's speed while a core is free for each end (docs/benchmarks.md). A socket of our own, sent and
digested by one thread, was slower then, and about a tenth faster with all cores busy, which does not justify another
port to secure. Digests (XXH3 in host memory, several times as fast as a socket) are computed between two waits, while
the backend moves the chunks that are in flight.

Failures: a dead peer, or a group that a new-generation notification aborted, raises torch's RuntimeError; errors of
`check` pass through. In both cases no operation remains that writes to memory.
The joiner's tensors then hold parts of the new state: it has no valid version until another copy succeeds.
"""

import itertools
import json
import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from swift_ft.comm.backend import (
    REPLICA_CHUNK,
    REPLICA_DIGESTS,
    REPLICA_HEADER,
    REPLICA_MANIFEST,
    Pending,
    Wire,
)
from swift_ft.device import accelerator_in_use
from swift_ft.errors import ReplayRefused, ReplicaDiffers
from swift_ft.log.memory import available_memory
from swift_ft.state.checkpoint_file import Described, check_tensor, described_by, identity
from swift_ft.state.digests import DIGEST_BYTES, Digest, digest_there, read
from swift_ft.state.digests import digests as digests_of_tensors
from swift_ft.state.tensors import differ, dtype_name, in_place, overlapping
from swift_ft.state.tree import dtype_of, join, split, stride_told

# The manifest, which describes a state to another replica, and the cutting of its bytes into chunks.
#
# A manifest is JSON: the state's skeleton (swift_ft.state.tree), which describes each tensor, and which of them share
# the same memory (tied weights): these are sent once. A state holds the local parts of sharded tensors, and says in
# words which ones they are (`swift_ft.state.fsdp`): manifests are equal exactly between replicas of one shard.

# Bytes. From 4 MiB on, a message reaches a raw socket's speed; one of 1 MiB reaches half of it.
CHUNK_BYTES_MAX = 8 << 20
CHUNK_BYTES_MIN = 64 << 10
# Limit on the memory that a tensor's strides span, as a multiple of its elements.
_REACH_MAX = 1 << 10
# A state is cut so that every source has about this many chunks, within the two limits above.
_CHUNKS_PER_SOURCE = 16
# A large tensor is cut at multiples of this many bytes.
_ALIGNED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A state at one version: its skeleton, and the tensors in the skeleton's order. The bytes of each are sent in the
    order of the indices, whatever its strides."""

    version: int
    skeleton: Any
    entries: tuple[Described, ...]

    def to_bytes(self) -> bytes:
        same = {entry.path: entry.same_as for entry in self.entries if entry.same_as}
        content = {"version": self.version, "skeleton": self.skeleton, "same": same}
        return json.dumps(content, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parses a manifest. Raises ValueError for one that `to_bytes` cannot have written, before any allocation."""
        try:
            value = json.loads(data)
            version, skeleton, same = value["version"], value["skeleton"], dict(value["same"])
            entries = _entries_of(skeleton, same)
            for it in entries:
                if it.memory > _REACH_MAX * max(it.size, 1):  # slices of larger tensors
                    raise ValueError(f"{it.path} has the strides {list(it.stride)}")
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if type(version) is not int or version < 0:
            raise ValueError(f"version {version!r}")
        return cls(version=version, skeleton=skeleton, entries=entries)


def _entries_of(skeleton: Any, same: Mapping[str, str]) -> tuple[Described, ...]:
    """`same`: path -> the earlier one with the same memory. Raises ValueError."""
    described = described_by(skeleton)
    places = {path: place for place, path in enumerate(described)}
    for path, other in same.items():
        alike = path in described and described.get(other) == described[path]
        if not alike or other in same or places[other] > places[path]:
            raise ValueError(f"{path} is said to be {other}")
    return tuple(replace(it, same_as=same.get(path, "")) for path, it in described.items())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor in this process, without its gradient history: the tensor itself unless sharded."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)  # looked up by name: importing DTensor is slow
    return tensor if to_local is None else to_local().detach()


def manifest_of(state: dict[str, Any], version: int) -> tuple[Manifest, list[torch.Tensor]]:
    """Returns (manifest, tensors in its order)."""
    tensors, skeleton = split(state)
    parts = [tensor.detach() for tensor in tensors.values()]
    seen: dict[Any, str] = {}
    same: dict[str, str] = {}
    for path, part in zip(tensors, parts, strict=True):
        check_tensor(path, part)
        first = seen.setdefault(identity(part), path) if part.numel() else path
        if first != path:
            same[path] = first
    version = int(state.get("version", version))
    return Manifest(version=version, skeleton=skeleton, entries=_entries_of(skeleton, same)), parts


def first_difference(one: Manifest, other: Manifest) -> str:
    """Returns the first path at which two manifests differ, for the error message."""
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
    tensor: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The payload of one operation: a piece of a large tensor as it lies in memory, or several small tensors packed,
    which are all on a device or all on the host."""

    index: int
    source: int  # index into the transfer's sources
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)


def plan_chunks(entries: Sequence[Described], sources: int) -> list[Chunk]:
    """Cuts tensors into chunks and assigns them to the sources in turn. Deterministic."""
    sizes = [entry.bytes for entry in entries]
    share = sum(sizes) // (sources * _CHUNKS_PER_SOURCE) // _ALIGNED * _ALIGNED
    limit = min(max(share, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
    chunks: list[tuple[Piece, ...]] = []
    packs: dict[bool, list[Piece]] = {True: [], False: []}
    for tensor, size in enumerate(sizes):
        if size == 0:
            continue
        if size * 4 > limit:  # a copy into a pack would cost more than an operation of its own
            parts = -(-size // limit)
            cuts = [*range(0, size, -(-size // parts // _ALIGNED) * _ALIGNED), size]
            chunks.extend((Piece(tensor, begin, end),) for begin, end in itertools.pairwise(cuts))
            continue
        pack = packs[entries[tensor].accelerator]
        if sum(piece.end for piece in pack) + size > limit:
            chunks.append(tuple(pack))
            pack.clear()
        pack.append(Piece(tensor, 0, size))
    chunks.extend(tuple(pack) for pack in packs.values() if pack)
    return [Chunk(index, index % sources, pieces) for index, pieces in enumerate(chunks)]


def fits(entry: Described, destination: torch.Tensor) -> bool:
    return (entry.dtype, entry.shape) == (dtype_name(destination), tuple(destination.shape))


def check_fits(entry: Described, destination: torch.Tensor, source: int, joiner: int) -> None:
    """Raises ReplicaDiffers if a tensor of that entry cannot be received into `destination`."""
    if not fits(entry, destination):
        room = f"{dtype_name(destination)}{list(destination.shape)}"
        raise ReplicaDiffers(f"{entry.path}: rank {source} holds {entry}, rank {joiner} has room for {room}")


# Destination of a received state: the joiner's own tensors, and new ones where it has none.

# A new tensor of this many bytes uses huge pages. The kernel clears pages when they are first written. With small
# pages that takes as long as receiving (2.4 GB/s against 7 in huge pages).
_HUGE_BYTES = 2 << 20


# Tensors whose shapes may change from step to step.
_GROWING = ("state.optimizers.", "state.objects.")


class Destination:
    """(joiner) ``parts``: uint8 views, one per entry, into which chunks are received … ``finish()``.

    Raises ReplicaDiffers if `into` has a tensor of another shape or type than the source `source`, and ReplayRefused
    if the memory does not suffice.
    """

    def __init__(
        self,
        manifest: Manifest,
        into: dict[str, torch.Tensor],
        source: int,
        joiner: int,
        *,
        older_copy: bool = False,
    ):
        """`older_copy`: `into` is no live state, only memory to reuse. A tensor of another shape or dtype gets new
        memory. Two names share a tensor here exactly if they do at the source."""
        self._older_copy = older_copy
        self._entries = manifest.entries
        self._into = into
        self._joiner = joiner
        here: dict[str, torch.Tensor] = {}
        for entry in self._entries:
            if entry.path not in into:
                continue
            may_differ = older_copy or entry.path.startswith(_GROWING)
            if may_differ and not fits(entry, into[entry.path]):
                continue
            check_fits(entry, into[entry.path], source, joiner)
            here[entry.path] = into[entry.path].detach()
        if older_copy:
            here = _each_once(self._entries, here)
        # Tied here as at the source: filled through the entry in `same_as`.
        tied = {e.path for e in self._entries if e.path in here and _same(here[e.path], here.get(e.same_as))}
        self._overlapping = overlapping({path: tensor for path, tensor in here.items() if path not in tied})
        for entry in self._entries:
            if entry.path in here and entry.path not in self._overlapping and not _laid_alike(entry, here):
                del here[entry.path]  # replaced by a new tensor
        tied &= here.keys()
        direct = {
            entry.path
            for entry in self._entries
            if entry.path in here
            and entry.path not in self._overlapping
            and _is_bytes(here[entry.path])
            and entry.accelerator is (here[entry.path].device.type != "cpu")
        }
        _check_memory(e.bytes for e in self._entries if not (e.path in direct or e.accelerator))
        self._received = {
            entry.path: here[entry.path] if entry.path in direct else fresh(entry)
            for entry in self._entries
            if not entry.same_as
        }
        self._copies = [
            (here[entry.path], self._received[entry.same_as or entry.path])
            for entry in self._entries
            if entry.path in here and entry.path not in tied and (entry.same_as or entry.path not in direct)
        ]
        self._here = here
        empty = torch.empty(0, dtype=torch.uint8)
        self.parts = [empty if e.same_as else in_place(self._received[e.path]) for e in self._entries]

    def finish(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by path, those of `into` filled. Raises ReplicaDiffers if these share memory wrongly."""
        for destination, value in self._copies:
            late = destination.device.type != "cpu" == value.device.type
            destination.copy_(value.pin_memory() if late else value, non_blocking=late)
        # What is laid out anew is given up one by one: a device may have no room for all of it twice.
        self._copies, self.parts = [], []
        shared = [entry for entry in self._entries if entry.path in self._overlapping]
        lost_bits = differ(
            [(self._here[each.path], self._received[each.same_as or each.path]) for each in shared]
        )
        for entry, lost in zip(shared, lost_bits, strict=True):
            if lost:  # memory shared here but not at the source
                raise ReplicaDiffers(
                    f"{entry.path} shares memory on rank {self._joiner} with what its replicas keep apart"
                )
        tensors: dict[str, torch.Tensor] = {}
        laid: dict[str, torch.Tensor] = {}
        for entry in self._entries:
            if entry.path in self._here:
                tensors[entry.path] = self._into[entry.path]
                continue
            first = entry.same_as or entry.path
            if self._older_copy and first in self._here:
                tensors[entry.path] = tensors[first]
                continue
            if first not in laid:
                laid[first] = _laid_out(self._received.pop(first), entry.stride)
            tensors[entry.path] = laid[first]
        return tensors


def _each_once(entries: Iterable[Described], here: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors to fill: of several names of one tensor, here or at the source, only the first."""
    once: dict[str, torch.Tensor] = {}
    filled: set[int] = set()
    for entry in entries:
        if entry.path in here and not entry.same_as and here[entry.path].data_ptr() not in filled:
            once[entry.path] = here[entry.path]
            filled.add(here[entry.path].data_ptr())
    return once


def _laid_alike(entry: Described, here: dict[str, torch.Tensor]) -> bool:
    """Returns whether the strides equal the source's: kernels choose their algorithm by strides."""
    return tuple(stride_told(here[entry.path])) == entry.stride


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if not stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def fresh(entry: Described) -> torch.Tensor:
    """Returns an uninitialised contiguous tensor of an entry's shape and dtype, on the device if the entry's is."""
    dtype = dtype_of(entry.dtype)
    if entry.accelerator and (accelerator := accelerator_in_use()) is not None:
        return torch.empty(entry.shape, dtype=dtype, device=accelerator.torch)
    if entry.bytes < _HUGE_BYTES:
        return torch.empty(entry.shape, dtype=dtype)
    memory = mmap.mmap(-1, entry.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(entry.shape)).view(entry.shape)


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's elements are one run of bytes that can be received into."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and identity(one) == identity(other)


def _check_memory(sizes: Iterable[int]) -> None:
    needed = sum(sizes)
    free = available_memory()
    if free is not None and needed > free:
        raise ReplayRefused(
            f"a replica's state needs {needed >> 20} MiB, {free >> 20} MiB are free; add memory to this machine"
        )


# Operations in flight per source, so that the backend is busy while a chunk is digested. They hold no copies.
_IN_FLIGHT = 8
_HEADER_WORDS = 5
_PROTOCOL = 0x7377_6966_7405
_MANIFEST_BYTES_MAX = 1 << 30
_NO_BYTES = torch.empty(0, dtype=torch.uint8)

OnChunk = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One joiner and the replicas that it copies from (global ranks), which divide the chunks between them.

    A rank that takes part in several transfers carries them out in the same order as the others do.
    """

    joiner: int
    sources: tuple[int, ...]
    version: int

    def __post_init__(self) -> None:
        if not self.sources or self.joiner in self.sources or len(set(self.sources)) != len(self.sources):
            raise ValueError(f"sources {self.sources} for joiner {self.joiner}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    digest: str  # of the whole state
    bytes: int  # of this source's share
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """The result of a copy. `state` fits TrainerState.load_state_dict and contains the tensors of `into`, filled."""

    state: dict[str, Any]
    digest: str
    bytes: int
    seconds: float
    witnesses: tuple[int, ...] = ()
    """Sources whose logs have all of their records (`swift_ft.train.replay`)."""


def _nothing(done: int, total: int) -> None:
    pass


def send_state(
    transfer: Transfer,
    rank: int,
    state: dict[str, Any],
    check: Callable[[], None],
    on_chunk: OnChunk = _nothing,
    *,
    wire: Wire,
    logged: bool = True,
) -> Sent:
    """(each source) Sends its share of `state`, a TrainerState's state_dict. Returns when all sends have completed.

    `check` is called between chunks, and so is `on_chunk` with (chunks sent, this source's chunks), first with 0.
    `logged`: the log has all of this rank's records.
    Raises RuntimeError (torch's) if the joiner is lost, UsageError for a state that cannot be sent.
    """
    begin = time.monotonic()
    manifest, tensors = manifest_of(state, transfer.version)
    source = transfer.sources.index(rank)
    data = manifest.to_bytes()
    header = torch.tensor(
        [_PROTOCOL, manifest.version, len(data), xxhash.xxh3_64_intdigest(data) >> 1, logged]
    )
    check()
    in_flight: deque[tuple[torch.Tensor, Pending]] = deque()

    def send(part: torch.Tensor, tag: int) -> None:
        in_flight.append((part, wire.send([part], transfer.joiner, tag)))

    try:
        send(header.view(torch.uint8), REPLICA_HEADER)
        send(torch.frombuffer(bytearray(data), dtype=torch.uint8), REPLICA_MANIFEST)
        chunks = plan_chunks(manifest.entries, len(transfer.sources))
        mine = [chunk for chunk in chunks if chunk.source == source]
        parts = _parts_of(manifest, tensors)
        found: list[Digest] = []
        done = 0
        on_chunk(0, len(mine))
        for chunk in chunks:
            pieces = _places(chunk, parts)
            if chunk.source == source:
                check()
                send(pieces[0] if len(pieces) == 1 else torch.cat(pieces), REPLICA_CHUNK + chunk.index)
                done += 1
                while len(in_flight) > _IN_FLIGHT:
                    in_flight.popleft()[1].wait()
                on_chunk(done, len(mine))
            found += map(digest_there, pieces)
        digests = b"".join(read(found))
        if digests:
            send(torch.frombuffer(bytearray(digests), dtype=torch.uint8), REPLICA_DIGESTS)
        while in_flight:
            check()
            in_flight.popleft()[1].wait()
    finally:
        in_flight.clear()
    return Sent(
        digest=_combined(data, digests),
        bytes=sum(chunk.bytes for chunk in mine),
        seconds=time.monotonic() - begin,
    )


@contextmanager
def _memory_of_device() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:  # the coordinator may have another plan
        raise ReplayRefused(f"the device has no room for a replica's state: {error}") from None


@_memory_of_device()
def receive_state(
    transfer: Transfer,
    rank: int,
    into: dict[str, torch.Tensor],
    check: Callable[[], None],
    on_chunk: OnChunk = _nothing,
    *,
    wire: Wire,
    older_copy: bool = False,
) -> Received:
    """(joiner) Receives the state of `transfer.version` from all its sources and verifies it.

    `into`: tensors by path, as swift_ft.state.tree.split names them, that are filled in place. Tensors of the state
    that it lacks are created. `check` is called between chunks, and so is `on_chunk` with (chunks arrived, all chunks),
    first with 0. `older_copy`: `into` is only memory to reuse (`Destination`).
    Raises ReplicaDiffers if the sources differ from each other, from the received bytes, or in shapes and dtypes from
    `into`; ReplayRefused if the memory does not suffice; RuntimeError (torch's) if a source is lost.
    """
    assert rank == transfer.joiner
    begin = time.monotonic()
    manifest, data, witnesses = _same_manifest(transfer, wire, check)
    destination = Destination(manifest, into, transfer.sources[0], rank, older_copy=older_copy)
    chunks = plan_chunks(manifest.entries, len(transfer.sources))
    found: list[Digest] = []
    in_flight: deque[tuple[Chunk, torch.Tensor, Pending]] = deque()

    def arrived() -> None:
        chunk, room, pending = in_flight.popleft()
        pending.wait()
        found.extend(map(digest_there, _unpack(chunk, room, destination.parts)))
        on_chunk(chunk.index + 1, len(chunks))

    on_chunk(0, len(chunks))
    try:
        for chunk in chunks:
            check()
            if len(in_flight) >= _IN_FLIGHT * len(transfer.sources):
                arrived()
            room = _room(chunk, destination.parts)
            source = transfer.sources[chunk.source]
            in_flight.append((chunk, room, wire.recv([room], source, REPLICA_CHUNK + chunk.index)))
        while in_flight:
            check()
            arrived()
    finally:
        in_flight.clear()
    digests = b"".join(read(found))
    _compare(transfer, wire, check, manifest, chunks, digests)
    tensors = destination.finish()
    return Received(
        state=join(manifest.skeleton, tensors),
        digest=_combined(data, digests),
        bytes=sum(chunk.bytes for chunk in chunks),
        seconds=time.monotonic() - begin,
        witnesses=witnesses,
    )


def digest_of(state: dict[str, Any], version: int) -> str:
    """Returns the digest that `Sent` and `Received` have for a state that one source sends."""
    manifest, tensors = manifest_of(state, version)
    parts = _parts_of(manifest, tensors)
    pieces = [place for chunk in plan_chunks(manifest.entries, 1) for place in _places(chunk, parts)]
    return _combined(manifest.to_bytes(), b"".join(digests_of_tensors(pieces)))


# --- manifests ---


def _same_manifest(
    transfer: Transfer, wire: Wire, check: Callable[[], None]
) -> tuple[Manifest, bytes, tuple[int, ...]]:
    """Returns the sources' manifest, its bytes, and the sources that have logged everything. Raises ReplicaDiffers if
    the manifests differ."""
    begun = {source: _receive_manifest(source, wire, check) for source in transfer.sources}
    texts = {source: text for source, (text, _) in begun.items()}
    manifests = {}
    for source, text in texts.items():
        try:
            manifests[source] = Manifest.from_bytes(text)
        except ValueError as error:
            raise ReplicaDiffers(f"rank {source} sent an invalid manifest: {error}", damaged=True) from None
    for source, manifest in manifests.items():
        if manifest.version != transfer.version:
            raise ReplicaDiffers(
                f"rank {source} holds version {manifest.version}, the plan says {transfer.version}"
            )
    first = transfer.sources[0]
    for source in transfer.sources[1:]:
        if texts[source] != texts[first]:
            path = first_difference(manifests[first], manifests[source])
            raise ReplicaDiffers(f"{_camps(texts)} hold different states, first at {path}")
    return manifests[first], texts[first], tuple(source for source, (_, logged) in begun.items() if logged)


def _receive_manifest(source: int, wire: Wire, check: Callable[[], None]) -> tuple[bytes, bool]:
    """Returns the manifest's bytes, and whether the source's log is complete."""
    check()
    header = torch.zeros(_HEADER_WORDS, dtype=torch.int64)
    wire.recv([header.view(torch.uint8)], source, REPLICA_HEADER).wait()
    protocol, _version, length, digest, logged = header.tolist()
    if protocol != _PROTOCOL or not 0 < length <= _MANIFEST_BYTES_MAX:
        raise ReplicaDiffers(
            f"rank {source} sent {protocol:#x} where a copy begins; run one version of swift-ft", damaged=True
        )
    check()
    text = torch.empty(length, dtype=torch.uint8)
    wire.recv([text], source, REPLICA_MANIFEST).wait()
    data = text.numpy().tobytes()
    if xxhash.xxh3_64_intdigest(data) >> 1 != digest:
        raise ReplicaDiffers(
            f"the manifest of rank {source} is not what it sent: its checksum differs", damaged=True
        )
    return data, bool(logged)


def _camps(values: dict[int, bytes]) -> str:
    """Describes groups of ranks with equal values: ``ranks 0, 1 and rank 2``."""
    camps: dict[bytes, list[str]] = {}
    for rank, value in values.items():
        camps.setdefault(value, []).append(str(rank))
    return " and ".join(f"rank{'s' if len(c) > 1 else ''} {', '.join(c)}" for c in camps.values())


# --- chunks and digests ---


def _parts_of(manifest: Manifest, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_NO_BYTES if e.same_as else in_place(t) for e, t in zip(manifest.entries, tensors, strict=True)]


def _places(chunk: Chunk, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [parts[piece.tensor][piece.begin : piece.end] for piece in chunk.pieces]


def _room(chunk: Chunk, parts: list[torch.Tensor]) -> torch.Tensor:
    """(joiner) Returns the memory for a chunk: its place in the state, or a buffer that is unpacked later."""
    places = _places(chunk, parts)
    return places[0] if len(places) == 1 else places[0].new_empty(chunk.bytes)


def _unpack(chunk: Chunk, room: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Puts what has arrived into its place. Returns the pieces."""
    pieces = torch.split(room, [piece.end - piece.begin for piece in chunk.pieces])
    for piece, place in zip(pieces, _places(chunk, parts), strict=True):
        if place.data_ptr() != piece.data_ptr():
            place.copy_(piece)
    return list(pieces)


def _combined(manifest: bytes, digests: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(manifest) + digests)


def _compare(
    transfer: Transfer,
    wire: Wire,
    check: Callable[[], None],
    manifest: Manifest,
    chunks: list[Chunk],
    digests: bytes,
) -> None:
    """Raises ReplicaDiffers unless all sources sent the digests that were computed here from the received bytes."""
    if not digests:
        return
    told: dict[int, bytes] = {}
    for source in transfer.sources:
        check()
        room = torch.empty(len(digests), dtype=torch.uint8)
        wire.recv([room], source, REPLICA_DIGESTS).wait()
        told[source] = room.numpy().tobytes()
    pieces = [(piece, chunk) for chunk in chunks for piece in chunk.pieces]

    def different(one: bytes, other: bytes) -> list[int]:
        size = DIGEST_BYTES
        return [
            i
            for i in range(len(pieces))
            if one[i * size : (i + 1) * size] != other[i * size : (i + 1) * size]
        ]

    def path(which: list[int]) -> str:
        return manifest.entries[min(pieces[i][0].tensor for i in which)].path

    first = told[transfer.sources[0]]
    for source in transfer.sources[1:]:
        if which := different(first, told[source]):
            raise ReplicaDiffers(f"{_camps(told)} hold different states, first at {path(which)}")
    if which := different(first, digests):
        source = transfer.sources[pieces[which[0]][1].source]
        raise ReplicaDiffers(
            f"what rank {transfer.joiner} received from rank {source} is not what it sent, first at {path(which)}",
            damaged=True,
        )
