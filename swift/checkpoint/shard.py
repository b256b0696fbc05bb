"""One rank's checkpoint as two files in a folder (swift/checkpoint/index.py draws them): written and read as a stream.

The elements go from the tensors' own memory to the file and back, so besides the tensors no more than a piece of a
file is held. safetensors' layout, so that its library and everybody who has it can take the weights out of a
checkpoint; written here, because the library wants the whole file in memory, and neither syncs nor checks anything.

Only regular files are opened, without following links, and nothing is believed that their length denies.
"""

import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from swift.checkpoint.dtypes import DTYPES, as_safetensors
from swift.checkpoint.index import (
    DATA,
    INDEX,
    INDEX_BYTES_MAX,
    Damaged,
    Index,
    Piece,
    check_skeleton,
    dump,
    parse,
)
from swift.checkpoint.state import empty_tensors, join, split
from swift.errors import UsageError

_PIECE_BYTES = 8 << 20
# What `join` raises for what `split` does not make.
_NO_STATE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not make anybody wait
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Snapshot:
    """A copy of a state at one moment, on the CPU. What was the same memory under two names is copied once."""

    def __init__(self, state: Any, into: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """`into`: an older copy's tensors by name, which are filled as far as they have the same form. UsageError: it
        holds what no checkpoint can."""
        try:
            tensors, self.skeleton = split(state)
            check_skeleton(self.skeleton)
        except (RecursionError, Damaged) as error:
            reason = (
                str(error) if isinstance(error, Damaged) else "the state is nested too deep, or in itself"
            )
            raise UsageError(f"the state cannot be saved: {reason}; keep it flatter") from None
        self.tensors: dict[str, torch.Tensor] = {}
        self.same: dict[str, str] = {}
        copied: dict[tuple[Any, ...], str] = {}
        filled: set[int] = set()
        for name, tensor in tensors.items():
            _check(name, tensor)
            layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            where = (tensor.device, tensor.data_ptr(), *layout)
            first = copied.setdefault(where, name) if tensor.nbytes else name
            if first != name:
                self.same[name] = first
            else:
                plain = tensor.detach().resolve_conj().resolve_neg()
                self.tensors[name] = _copied(plain, into.get(name), filled)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state(self) -> Any:
        """The copy, as the state was given."""
        same = {name: self.tensors[first] for name, first in self.same.items()}
        return join(self.skeleton, self.tensors | same)


def _copied(tensor: torch.Tensor, room: torch.Tensor | None, filled: set[int]) -> torch.Tensor:
    """On the CPU, with its strides. `filled`: rooms that have a tensor of this copy already, by address: what were two
    names of one tensor may be two tensors by now."""
    form = (tensor.dtype, tensor.shape, tensor.stride())
    if room is None or room.data_ptr() in filled or (room.dtype, room.shape, room.stride()) != form:
        return tensor.to("cpu", copy=True)
    filled.add(room.data_ptr())
    return room.copy_(tensor)


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else "sparse or nested"
        raise UsageError(f"the state at {name} holds a {kind} tensor; keep it as plain tensors")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise UsageError(f"the state at {name} holds a tensor of {tensor.dtype}; keep it as another type")


# --- writing ---


def write(
    folder: Path, snapshot: Snapshot, version: int, rank: int, half: Callable[[], None] = lambda: None
) -> int:
    """Both files, durable, into an empty folder; gives their bytes. OSError, Damaged (the index would be too long).
    `half`: called between the two."""
    head = _head(snapshot.tensors)
    pieces, at = [], len(head)
    with _opened(folder / DATA, _NEW) as file:
        _write(file, memoryview(head))
        for name, tensor in snapshot.tensors.items():
            state = xxhash.xxh3_128()
            for part in _parts(elements(tensor)):
                state.update(part)
                _write(file, part)
            pieces.append(Piece(name=name, at=at, size=tensor.nbytes, digest=state.hexdigest()))
            at += tensor.nbytes
        os.fsync(file)
    half()
    text = dump(
        Index(
            version=version,
            rank=rank,
            data_bytes=at,
            head_bytes=len(head),
            head_digest=xxhash.xxh3_128_hexdigest(head),
            pieces=tuple(pieces),
            same=snapshot.same,
            state=snapshot.skeleton,
        )
    )
    with _opened(folder / INDEX, _NEW) as file:
        _write(file, memoryview(text))
        os.fsync(file)
    sync_folder(folder)
    return at + len(text)


def _head(tensors: Mapping[str, torch.Tensor]) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        dtype, shape = as_safetensors(
            str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes
        )
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def elements(tensor: torch.Tensor) -> memoryview:
    """Row-major."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def _parts(data: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(data), _PIECE_BYTES):
        yield data[at : at + _PIECE_BYTES]


def _write(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data) :]


# --- reading ---


def read(folder: Path, version: int, rank: int) -> Any:
    """The state that `write` was given. Damaged, OSError. It is whole, and nothing of it came from anywhere but these
    two files; no memory is taken for what they do not have."""
    with _opened(folder.parent, _FOLDER) as above, _opened(folder.name, _FOLDER, above) as inside:
        with _regular(INDEX, inside) as (file, size):
            if size > INDEX_BYTES_MAX + 4096:
                raise Damaged(f"the index has {size} bytes")
            text = bytearray(size)
            _read(file, memoryview(text))
        index = parse(bytes(text))
        if (index.version, index.rank) != (version, rank):
            raise Damaged(f"it is version {index.version} of rank {index.rank}")
        with _regular(DATA, inside) as (file, size):
            if size != index.data_bytes:
                raise Damaged(f"{DATA} has {size} bytes instead of {index.data_bytes}")
            if index.memory_bytes > _memory_bytes():
                raise Damaged(f"it takes {index.memory_bytes} bytes, more than this machine has memory")
            _check_head(file, index)
            tensors = empty_tensors(index.state)
            for piece in index.pieces:
                _fill(file, tensors[piece.name], piece)
    for name, other in index.same.items():
        tensors[name] = tensors[other]
    try:
        return join(index.state, tensors)
    except _NO_STATE as error:
        raise Damaged(f"its state cannot be put together: {' '.join(str(error).split())[:200]}") from None


def _check_head(file: int, index: Index) -> None:
    state, left = xxhash.xxh3_128(), index.head_bytes
    while left:
        part = bytearray(min(left, _PIECE_BYTES))
        _read(file, memoryview(part))
        state.update(part)
        left -= len(part)
    if state.hexdigest() != index.head_digest:
        raise Damaged(f"the header of {DATA} is not what its checksum says")


def _fill(file: int, tensor: torch.Tensor, piece: Piece) -> None:
    row_major = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
    state = xxhash.xxh3_128()
    for part in _parts(elements(row_major)):
        _read(file, part)
        state.update(part)
    if state.hexdigest() != piece.digest:
        raise Damaged(f"tensor {piece.name[:80]!r} is not what its checksum says")
    if row_major is not tensor:
        tensor.copy_(row_major)


def _read(file: int, into: memoryview) -> None:
    while len(into):
        got = os.readv(file, [into])
        if not got:
            raise Damaged("a file ends too early")
        into = into[got:]


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _opened(path: str | Path, flags: int, inside: int | None = None) -> Iterator[int]:
    file = os.open(path, flags, 0o666, dir_fd=inside)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _regular(name: str, inside: int) -> Iterator[tuple[int, int]]:
    """(descriptor, bytes)"""
    with _opened(name, _FILE, inside) as file:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode):
            raise Damaged(f"{name} is no file")
        yield file, facts.st_size


def sync_folder(path: Path) -> None:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as folder:
        os.fsync(folder)
