"""A joiner gets a replica's state, bit for bit, over the rebuilt default group.

(source) ``send_state``: header (also says whether the log has all that this rank has done), manifest, its share of the
chunks, digests of every piece of the whole state
(joiner) ``receive_state``: manifests of all sources compared, chunks, digests of all sources compared with each other
and with what arrived

Every source tells the digest of everything although it sends only its share, so that replicas that have drifted
apart are found out before the joiner resumes from a mixture of them. Bytes go from the source's tensors into the
joiner's without a copy between; small tensors are packed, and a tensor whose memory is not one contiguous run of
bytes on the CPU goes through a copy that is.

The payload goes through the backend's point-to-point operations. With chunks of 4 MiB and more, several in flight,
they reach a raw TCP socket's speed while a core is free for each end (`swift-ft bench replica`); a socket of our own,
sent and digested by one thread, was slower then, and about a tenth faster with all cores taken, which is not worth
another port to guard. Digests (XXH3, several times as fast as a socket) are computed between two waits, while the
backend moves the chunks that are in flight.

What goes wrong: a peer that dies, or a group that a notice broke open, shows as torch's RuntimeError; `check`
raises what it raises. Both leave no operation behind that writes anywhere.
The joiner's tensors then hold parts of the new state: it holds no version until another copy succeeds.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from swift.checkpoint.state import join
from swift.errors import ReplicaDiffers
from swift.runtime.backends.base import Pending, Wire
from swift.runtime.manifest import (
    Chunk,
    Manifest,
    first_difference,
    manifest_of,
    plan_chunks,
)
from swift.runtime.receive_buffers import Destination
from swift.runtime.tags import REPLICA_CHUNK, REPLICA_DIGESTS, REPLICA_HEADER, REPLICA_MANIFEST
from swift.runtime.tensors import as_bytes, byte_view

# Operations in flight per source: the backend has the next one at hand while a chunk is digested. They hold no copies.
_IN_FLIGHT = 8
_DIGEST_BYTES = 16
_HEADER_WORDS = 5
_PROTOCOL = 0x7377_6966_7403
_MANIFEST_BYTES_MAX = 1 << 30
_NO_BYTES = torch.empty(0, dtype=torch.uint8)

OnChunk = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One joiner and the replicas that it copies from (global ranks). They share the chunks between them.

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
    """`state` is what TrainerState.load_state_dict takes; tensors of `into` are in it, already filled."""

    state: dict[str, Any]
    digest: str
    bytes: int
    seconds: float
    witnesses: tuple[int, ...] = ()
    """The sources whose logs hold all that they have done (`swift.log.gaps`)."""


class DefaultGroup:
    """The `Wire` of torch's default process group, whichever it is now."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        work = dist.isend(tensors[0], to, tag=tag)
        assert work is not None
        return work

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        work = dist.irecv(tensors[0], source, tag=tag)
        assert work is not None
        return work


def _nothing(done: int, total: int) -> None:
    pass


def send_state(
    transfer: Transfer,
    rank: int,
    state: dict[str, Any],
    check: Callable[[], None],
    on_chunk: OnChunk = _nothing,
    wire: Wire | None = None,
    logged: bool = True,
) -> Sent:
    """(each source) Sends its share of `state`, a TrainerState's state_dict. Returns when the bytes are on their way.

    `check` is called between chunks, and so is `on_chunk` with (chunks sent, this source's chunks), first with 0.
    `logged`: the log has all that this rank has done.
    Raises RuntimeError (torch's) if the joiner is lost, UsageError for a state that cannot be sent.
    """
    begin = time.monotonic()
    wire = wire or DefaultGroup()
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
        parts = [
            _NO_BYTES if e.same_as else as_bytes(t) for e, t in zip(manifest.entries, tensors, strict=True)
        ]
        chunks = plan_chunks([entry.bytes for entry in manifest.entries], len(transfer.sources))
        mine = [chunk for chunk in chunks if chunk.source == source]
        digests = bytearray()
        done = 0
        on_chunk(0, len(mine))
        for chunk in chunks:
            if chunk.source == source:
                check()
                send(_packed(chunk, parts), REPLICA_CHUNK + chunk.index)
                done += 1
                while len(in_flight) > _IN_FLIGHT:
                    in_flight.popleft()[1].wait()
                on_chunk(done, len(mine))
            digests += _digests(chunk, parts)
        if digests:
            send(torch.frombuffer(digests, dtype=torch.uint8), REPLICA_DIGESTS)
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


def receive_state(
    transfer: Transfer,
    rank: int,
    into: dict[str, torch.Tensor],
    check: Callable[[], None],
    on_chunk: OnChunk = _nothing,
    wire: Wire | None = None,
    *,
    older_copy: bool = False,
) -> Received:
    """(joiner) Receives the state of `transfer.version` from all its sources and verifies it.

    `into`: tensors by path, as swift.checkpoint.state.split names them, that are filled in place; tensors of the
    state that it lacks are made. `check` is called between chunks, and so is `on_chunk` with (chunks arrived, all
    chunks), first with 0. `older_copy`: `into` is only memory to use again (`Destination`).
    Raises ReplicaDiffers if the sources differ from each other, from what arrived, or in shapes and types from
    `into`; RuntimeError (torch's) if a source is lost.
    """
    assert rank == transfer.joiner
    begin = time.monotonic()
    wire = wire or DefaultGroup()
    manifest, data, witnesses = _same_manifest(transfer, wire, check)
    destination = Destination(manifest, into, transfer.sources[0], rank, older_copy=older_copy)
    chunks = plan_chunks([entry.bytes for entry in manifest.entries], len(transfer.sources))
    digests = bytearray()
    in_flight: deque[tuple[Chunk, torch.Tensor, Pending]] = deque()

    def arrived() -> None:
        chunk, packed, pending = in_flight.popleft()
        pending.wait()
        if len(chunk.pieces) > 1:
            _unpack(chunk, packed, destination.parts)
        digests.extend(_digests(chunk, destination.parts))
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
    _compare(transfer, wire, check, manifest, chunks, bytes(digests))
    tensors = destination.finish()
    return Received(
        state=join(manifest.skeleton, tensors),
        digest=_combined(data, digests),
        bytes=sum(chunk.bytes for chunk in chunks),
        seconds=time.monotonic() - begin,
        witnesses=witnesses,
    )


def digest_of(state: dict[str, Any], version: int) -> str:
    """What `Sent` and `Received` tell of a state that one source sends."""
    manifest, tensors = manifest_of(state, version)
    parts = [_NO_BYTES if e.same_as else as_bytes(t) for e, t in zip(manifest.entries, tensors, strict=True)]
    chunks = plan_chunks([entry.bytes for entry in manifest.entries], 1)
    return _combined(manifest.to_bytes(), b"".join(_digests(chunk, parts) for chunk in chunks))


# --- manifests ---


def _same_manifest(
    transfer: Transfer, wire: Wire, check: Callable[[], None]
) -> tuple[Manifest, bytes, tuple[int, ...]]:
    """The manifest of all sources (ReplicaDiffers if they have several), and those that have logged everything."""
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
    """And whether its log is whole."""
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
    """Which ranks agree with which: ``ranks 0, 1 and rank 2``."""
    camps: dict[bytes, list[str]] = {}
    for rank, value in values.items():
        camps.setdefault(value, []).append(str(rank))
    return " and ".join(f"rank{'s' if len(c) > 1 else ''} {', '.join(c)}" for c in camps.values())


# --- chunks and digests ---


def _room(chunk: Chunk, parts: list[torch.Tensor]) -> torch.Tensor:
    """Where a chunk is received: its place in the state, or a pack that is taken apart later."""
    if len(chunk.pieces) > 1:
        return torch.empty(chunk.bytes, dtype=torch.uint8)
    piece = chunk.pieces[0]
    return parts[piece.tensor][piece.begin : piece.end]


def _packed(chunk: Chunk, parts: list[torch.Tensor]) -> torch.Tensor:
    if len(chunk.pieces) > 1:
        return torch.cat([parts[piece.tensor][piece.begin : piece.end] for piece in chunk.pieces])
    return _room(chunk, parts)


def _unpack(chunk: Chunk, packed: torch.Tensor, parts: list[torch.Tensor]) -> None:
    at = 0
    for piece in chunk.pieces:
        size = piece.end - piece.begin
        parts[piece.tensor][piece.begin : piece.end] = packed[at : at + size]
        at += size


def _digests(chunk: Chunk, parts: list[torch.Tensor]) -> bytes:
    """One digest per piece: a difference is found out by its tensor's name."""
    return b"".join(
        xxhash.xxh3_128_digest(byte_view(parts[piece.tensor][piece.begin : piece.end]).data)
        for piece in chunk.pieces
    )


def _combined(manifest: bytes, digests: bytes | bytearray) -> str:
    return xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(manifest) + digests)


def _compare(
    transfer: Transfer,
    wire: Wire,
    check: Callable[[], None],
    manifest: Manifest,
    chunks: list[Chunk],
    digests: bytes,
) -> None:
    """Raises ReplicaDiffers unless all sources told the digests that were computed here from what arrived."""
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
        size = _DIGEST_BYTES
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
