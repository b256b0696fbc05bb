"""One rank's checkpoint as two files, written and read as a stream. A comment below draws their layout.

The elements go directly between the tensors' memory and the file, so that in addition to the tensors at most a piece of
a file is held. The layout is that of safetensors, so that its library can read the weights of a checkpoint. The code
here does not use that library: it needs the whole file in memory, and neither syncs nor checks anything.

Where the files are is the business of `swift_ft.state.checkpoint_place`. A size in a file is checked against the file's
length.
"""

import ctypes
import errno
import json
import math
import os
import struct
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from swift_ft.device import Accelerator, Event, accelerator_of, until_over
from swift_ft.errors import UsageError
from swift_ft.log.record import DTYPE_BY_NAME
from swift_ft.state.tree import dtype_of, join, split
from swift_ft.text import unique_keys

# The element types that a checkpoint may hold. A name that is missing here is refused, never looked up in torch.

# Types that safetensors has. The others are stored as bytes (U8); the index has their real type.
_SAFETENSORS: Mapping[str, str] = MappingProxyType(
    {
        name: dtype.safetensors
        for name, dtype in DTYPE_BY_NAME.items()
        if dtype.safetensors and name != "float8_e8m0fnu"
    }
)
_OTHERS = (
    "complex32",
    "complex128",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
)

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name) for name in (*_SAFETENSORS, *_OTHERS)}
)


# The index of one rank's checkpoint: it describes the data and contains nothing that could be executed.
#
# ::
#
#     index.jsonl           line 1: {"swift_checkpoint": 1, "bytes": …, "xxh3_128": "…"}      of line 2
#                           line 2: {"version", "rank", "data": {"bytes", "head_bytes", "head_xxh3_128"},
#                                    "tensors": [{"name", "at", "bytes", "xxh3_128"} | {"name", "same_as"}, …],
#                                    "state": the skeleton of swift_ft.state.tree}
#     tensors.safetensors   8 bytes of length, a JSON header, the tensors' elements one after another
#
# So every byte of both files is under a checksum. Checksums detect accidents. A forged file is stopped by the checks
# here, before anything is allocated: the tensors are those that the skeleton describes, of known element types, as long
# as type and shape say, and follow each other without gaps to the end of the file.

FORMAT = 1
INDEX = "index.jsonl"
DATA = "tensors.safetensors"

INDEX_BYTES_MAX = 64 << 20
"""Limit for writing and reading: parsing takes ten times as much memory."""
_FIRST_LINE_MAX = 256
DEPTH_MAX = 300
"""Levels of JSON in the state; a dict inside another one is three levels deeper."""
_DIMENSIONS_MAX = 64


class Damaged(ValueError):
    """The files are not what a rank writes; the message gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The elements of one tensor in the data file: row-major, regardless of its strides in memory."""

    name: str
    at: int
    size: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    version: int
    rank: int
    data_bytes: int
    """Size of the data file, its head included."""
    head_bytes: int
    head_digest: str
    pieces: tuple[Piece, ...]
    same: Mapping[str, str]
    """Name of a tensor that shares its memory with another one -> name of that one, which is stored."""
    state: Any
    memory_bytes: int = 0
    """Bytes that the tensors take in memory when they are loaded."""


def digest(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def dump(index: Index) -> bytes:
    """Returns the index file's bytes. Raises Damaged if it would be longer than `parse_index` accepts."""
    tensors: list[dict[str, Any]] = [
        {"name": piece.name, "at": piece.at, "bytes": piece.size, "xxh3_128": piece.digest}
        for piece in index.pieces
    ]
    tensors += [{"name": name, "same_as": other} for name, other in index.same.items()]
    body = _line(
        {
            "version": index.version,
            "rank": index.rank,
            "data": {
                "bytes": index.data_bytes,
                "head_bytes": index.head_bytes,
                "head_xxh3_128": index.head_digest,
            },
            "tensors": tensors,
            "state": index.state,
        }
    )
    if len(body) > INDEX_BYTES_MAX:
        raise Damaged(
            f"what is not tensors takes {len(body)} bytes, more than {INDEX_BYTES_MAX}; "
            "keep large lists in tensors"
        )
    return _line({"swift_checkpoint": FORMAT, "bytes": len(body), "xxh3_128": digest(body)}) + body


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def parse_index(content: bytes) -> Index:
    """Validates and returns an index. Raises Damaged if `dump` would not write it."""
    first, newline, body = content.partition(b"\n")
    if not newline or len(first) >= _FIRST_LINE_MAX:
        raise Damaged("the index has no first line")
    says = _fields(_json(first), "the first line", swift_checkpoint=int, bytes=int, xxh3_128=str)
    if says["swift_checkpoint"] != FORMAT:
        raise Damaged(
            f"it has format {says['swift_checkpoint']}, and this version of swift-ft reads {FORMAT}"
        )
    if says["bytes"] != len(body) or says["xxh3_128"] != digest(body):
        raise Damaged("the index is not what its checksum says")
    return _index(_json(body))


def _index(value: Any) -> Index:
    top = _fields(value, "the index", version=int, rank=int, data=dict, tensors=list, state=object)
    data = _fields(top["data"], "data", bytes=int, head_bytes=int, head_xxh3_128=str)
    described = described_by(top["state"])
    pieces: list[Piece] = []
    same: dict[str, str] = {}
    at = data["head_bytes"]
    if at < 0:
        raise Damaged("the data begins in front of its file")
    known: set[str] = set()
    for entry in top["tensors"]:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in described or name in known or name in same:
            raise Damaged(f"tensor {str(name)[:80]!r} is listed twice, or is not of the state")
        if "same_as" in entry:
            other = _fields(entry, "a tensor", name=str, same_as=str)["same_as"]
            if other not in known or described[other] != described[name]:
                raise Damaged(f"tensor {name[:80]!r} is said to be another one that it cannot be")
            same[name] = other
            continue
        piece = _fields(entry, "a tensor", name=str, at=int, bytes=int, xxh3_128=str)
        if piece["bytes"] != described[name].size or piece["at"] != at:
            raise Damaged(f"tensor {name[:80]!r} does not lie where its element type and shape put it")
        known.add(name)
        pieces.append(Piece(name=name, at=at, size=piece["bytes"], digest=piece["xxh3_128"]))
        at += piece["bytes"]
    if len(known) + len(same) != len(described):
        raise Damaged("not all tensors of the state are listed")
    if at != data["bytes"]:
        raise Damaged("the tensors do not fill their file")
    return Index(
        version=top["version"],
        rank=top["rank"],
        data_bytes=data["bytes"],
        head_bytes=data["head_bytes"],
        head_digest=data["head_xxh3_128"],
        pieces=tuple(pieces),
        same=same,
        state=top["state"],
        memory_bytes=sum(described[piece.name].memory for piece in pieces),
    )


# --- the state's skeleton ---


def check_skeleton(skeleton: Any) -> None:
    """Raises Damaged if the skeleton could not be read back."""
    for _ in _leaves(skeleton, 0):
        pass


@dataclass(frozen=True, slots=True)
class Described:
    """One tensor, or the bytes of an array."""

    path: str = field(compare=False)
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Empty for contiguous strides."""
    size: int
    """Bytes of its elements."""
    memory: int
    """Bytes in memory, with the gaps that its strides leave."""
    accelerator: bool = False
    """It was on a device."""
    same_as: str = ""
    """(a transfer) Path of the earlier tensor that has the same memory, and so is sent for it."""

    @property
    def bytes(self) -> int:
        """Bytes that are sent for it."""
        return 0 if self.same_as else self.size

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def described_by(skeleton: Any) -> dict[str, Described]:
    """Returns name -> the skeleton's description of the tensor, or of the array's bytes, in the order in which `split`
    returns them. `join` checks the rest. Raises Damaged."""
    described: dict[str, Described] = {}
    for leaf in _leaves(skeleton, 0):
        name = leaf["tensor"] if "tensor" in leaf else leaf["array"]
        if not isinstance(name, str) or name in described:
            raise Damaged(f"two tensors are called {str(name)[:80]!r}")
        described[name] = _tensor(leaf, name) if "tensor" in leaf else _array(leaf, name)
    return described


def _tensor(leaf: Mapping[str, Any], name: str) -> Described:
    required, optional = {"tensor", "dtype", "shape"}, {"stride", "accelerator"}
    if not required <= leaf.keys() <= required | optional or leaf.get("accelerator", True) is not True:
        raise Damaged(f"tensor {name[:80]!r} is not described")
    dtype = leaf["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Damaged(f"tensor {name[:80]!r} has the unknown element type {str(dtype)[:40]!r}")
    shape = _lengths(leaf["shape"], name)
    stride = _lengths(leaf["stride"], name) if "stride" in leaf else []
    size = math.prod(shape) * DTYPES[dtype].itemsize
    memory = size
    if stride and len(stride) == len(shape) and size:
        reach = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        memory = max(size, (reach + 1) * DTYPES[dtype].itemsize)
    if ("stride" in leaf and len(stride) != len(shape)) or max(memory, *shape, *stride, 0) >= _FAR:
        raise Damaged(f"tensor {name[:80]!r} is larger than any memory")
    return Described(name, dtype, tuple(shape), tuple(stride), size, memory, "accelerator" in leaf)


def _array(leaf: Mapping[str, Any], name: str) -> Described:
    size = leaf.get("bytes")
    if type(size) is not int or not 0 <= size < _FAR:
        raise Damaged(f"array {name[:80]!r} has no size")
    _lengths(leaf.get("shape"), name)
    return Described(name, "uint8", (size,), (), size, size)


_FAR = 1 << 62


def _leaves(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    if not isinstance(value, dict | list):
        return
    if depth > DEPTH_MAX:
        raise Damaged(f"the state is nested too deep, in {DEPTH_MAX} levels of JSON")
    if isinstance(value, dict):
        if "tensor" in value or "array" in value:
            yield value
            return
        if "scalar" in value:
            return
    for item in value.values() if isinstance(value, dict) else value:
        yield from _leaves(item, depth + 1)


def empty_tensors(skeleton: Any) -> dict[str, torch.Tensor]:
    """Returns an uninitialised tensor for every tensor that the skeleton names, with its strides."""
    tensors: dict[str, torch.Tensor] = {}
    for leaf in _leaves(skeleton, 0):
        if "array" in leaf:
            tensors[leaf["array"]] = torch.empty(leaf["bytes"], dtype=torch.uint8)
        else:
            tensors[leaf["tensor"]] = empty_like(leaf)
    return tensors


def empty_like(leaf: dict[str, Any]) -> torch.Tensor:
    """Returns an uninitialised tensor for a skeleton's description. Raises ValueError if `split` cannot return it."""
    dtype, shape = dtype_of(leaf["dtype"]), leaf["shape"]
    if "stride" not in leaf:
        return torch.empty(shape, dtype=dtype)
    stride = leaf["stride"]
    if len(stride) != len(shape) or any(type(step) is not int or step < 0 for step in stride):
        raise ValueError(f"strides {stride} for the shape {shape}")
    return torch.empty_strided(shape, stride, dtype=dtype)


def _lengths(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or len(value) > _DIMENSIONS_MAX:
        raise Damaged(f"tensor {name[:80]!r} has no shape")
    if not all(type(length) is int and 0 <= length < _FAR for length in value):
        raise Damaged(f"tensor {name[:80]!r} has a shape that none can have")
    return value


# --- JSON of unknown origin ---


def _json(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise Damaged("the index is nested too deep") from None
    except ValueError as error:
        raise Damaged(f"the index is no JSON: {error}") from None


def _fields(value: Any, what: str, **kinds: type) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        raise Damaged(f"{what} has other fields than {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(value[name], kind) or (kind is int and isinstance(value[name], bool)):
            raise Damaged(f"{what}: {name} is of another type")
    return value


_PIECE_BYTES = 8 << 20
# Errors that `join` raises for a state that `split` does not produce.
_NO_STATE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)


class Snapshot:
    """A copy of a state at one moment, on the CPU. Memory that has two names is copied once.

    A device's tensors are copied in one go beside its other work. The host waits when it reads `tensors`. The device
    waits at once for what the next step's computation may change, and in the next update for `late`.
    """

    def __init__(
        self,
        state: Any,
        into: Mapping[str, torch.Tensor] = MappingProxyType({}),
        late: Container[int] = (),
    ) -> None:
        """`into`: an older copy's tensors by name, which are reused where dtype, shape and strides match. `late`:
        addresses of tensors that only updates change. Raises UsageError if the state contains a value that a checkpoint
        cannot hold."""
        try:
            tensors, self.skeleton = split(state)
            check_skeleton(self.skeleton)
        except (RecursionError, Damaged) as error:
            reason = (
                str(error) if isinstance(error, Damaged) else "the state is nested too deep, or in itself"
            )
            raise UsageError(f"the state cannot be saved: {reason}; keep it flatter") from None
        self._tensors: dict[str, torch.Tensor] = {}
        self._copied: list[tuple[Accelerator, Event]] = []
        self.same: dict[str, str] = {}
        copies: dict[torch.device, tuple[list[_Copy], list[_Copy]]] = {}
        copied: dict[tuple[Any, ...], str] = {}
        filled: set[int] = set()
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
            first = copied.setdefault(identity(tensor), name) if tensor.nbytes else name
            if first != name:
                self.same[name] = first
            else:
                plain = tensor.detach().resolve_conj().resolve_neg()
                if plain.device.type == "cpu":
                    self._tensors[name] = _copied(plain, into.get(name), filled)
                else:
                    copy = _room(plain, into.get(name), filled)
                    self._tensors[name] = copy[0]
                    copies.setdefault(plain.device, ([], []))[plain.data_ptr() in late].append(copy)
        for device, (early, others) in copies.items():
            self._copy_out(accelerator_of(device), early, others)

    def _copy_out(self, device: Accelerator, early: "list[_Copy]", late: "list[_Copy]") -> None:
        if early:
            copied = device.copy_all_out(early)
            device.hold(copied)
        if late:
            copied = device.copy_all_out(late)
            device.owe(copied)
        self._copied.append((device, copied))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The copies by name. Waits until they are there."""
        for _, event in self._copied:
            until_over(event)
        return self._tensors

    def wait(self) -> None:
        """(the trainer's thread) Waits for the device until the copies are there."""
        for device, event in self._copied:
            device.wait(event)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def state(self) -> Any:
        """Returns the copy in the form of the original state."""
        return join(self.skeleton, self.named())

    def named(self) -> dict[str, torch.Tensor]:
        """Returns the copies by all names, for `into`."""
        return self.tensors | {name: self.tensors[first] for name, first in self.same.items()}


def restored(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the state of a `Snapshot` (its skeleton, its tensors by all names) in memory of its own."""
    return join(skeleton, Snapshot(tensors).state())


def _copied(tensor: torch.Tensor, room: torch.Tensor | None, filled: set[int]) -> torch.Tensor:
    """Returns a CPU copy with the same strides, in `room` if that fits. `filled`: addresses of rooms in use. It is
    needed because two names of one tensor in the older copy may be two tensors now."""
    form = (tensor.dtype, tensor.shape, tensor.stride())
    if room is None or room.data_ptr() in filled or (room.dtype, room.shape, room.stride()) != form:
        return tensor.to("cpu", copy=True)
    filled.add(room.data_ptr())
    return room.copy_(tensor)


_Copy = tuple[torch.Tensor, torch.Tensor]


def _room(tensor: torch.Tensor, room: torch.Tensor | None, filled: set[int]) -> _Copy:
    """Returns pinned memory for a device's tensor, in `room` if that fits, and the tensor as it goes there: as one run
    of bytes, since a device copies other forms by way of memory that is not pinned."""
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():  # there are holes in its memory
        tensor = tensor.contiguous()
    form = (tensor.dtype, tensor.shape, tensor.stride())
    if (
        room is None
        or room.data_ptr() in filled
        or (room.dtype, room.shape, room.stride()) != form
        or not room.is_pinned()
    ):
        pinned = accelerator_of(tensor.device).pinned(tensor.numel(), tensor.dtype)
        return pinned.as_strided(tensor.shape, tensor.stride()), tensor
    filled.add(room.data_ptr())
    return room, tensor


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors in host memory: themselves, or a device's copies, made in one go and waited for once."""
    found, copies = dict(tensors), dict[torch.device, list[_Copy]]()
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            copy = _room(tensor.detach().resolve_conj().resolve_neg(), None, set())
            found[name] = copy[0]
            copies.setdefault(tensor.device, []).append(copy)
    for device, pairs in copies.items():
        accelerator = accelerator_of(device)
        accelerator.wait(accelerator.copy_all_out(pairs))
    return found


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what the names of one tensor have in common: its memory, and the way in which that is read."""
    layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), *layout


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raises UsageError for a tensor that a state cannot hold."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else "sparse or nested"
        raise UsageError(f"the state at {name} holds a {kind} tensor; keep it as plain tensors")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise UsageError(f"the state at {name} holds a tensor of {tensor.dtype}; keep it as another type")


# --- writing ---


Create = Callable[[str], AbstractContextManager[Callable[[memoryview], None]]]
"""(context manager) Creates a file of a new shard, by its name. Yields what appends to it. Raises OSError."""


def write_shard(
    create: Create, snapshot: Snapshot, version: int, rank: int, half: Callable[[], None] = lambda: None
) -> int:
    """Writes both files. Returns their bytes. `half`: called between the two. Raises OSError, or Damaged if the index
    would be too long."""
    head = _head(snapshot.tensors)
    pieces, at = [], len(head)
    with create(DATA) as write:
        write(memoryview(head))
        for name, tensor in snapshot.tensors.items():
            state = xxhash.xxh3_128()
            for part in _parts(elements(tensor)):
                state.update(part)
                write(part)
            pieces.append(Piece(name=name, at=at, size=tensor.nbytes, digest=state.hexdigest()))
            at += tensor.nbytes
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
    with create(INDEX) as write:
        write(memoryview(text))
    return at + len(text)


def _head(tensors: Mapping[str, torch.Tensor]) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        word = _SAFETENSORS.get(str(tensor.dtype).removeprefix("torch."))
        shape = [tensor.nbytes] if word is None else list(tensor.shape)
        header[name] = {"dtype": word or "U8", "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Returns uint8 [bytes] that shares memory with the tensor and keeps it alive. `tensor`: contiguous, on the CPU.

    ``tensor.numpy()`` would mark the storage as not resizable. The storage may be the trainer's, and some of torch's
    functions resize their arguments (observers of quantization-aware training).
    """
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return np.frombuffer(memory, dtype=np.uint8)


def elements(tensor: torch.Tensor) -> memoryview:
    """Returns the elements' bytes in row-major order."""
    return memoryview(bytes_of(tensor.resolve_conj().resolve_neg().contiguous()).data)


def _parts(data: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(data), _PIECE_BYTES):
        yield data[at : at + _PIECE_BYTES]


# --- reading ---


class Opened(NamedTuple):
    """An open file of a shard, read from its begin on."""

    size: int
    read: Callable[[memoryview], int]
    """Reads as much as there is room for, or less. Returns the bytes read; 0 at the end. Raises OSError."""


Open = Callable[[str], AbstractContextManager[Opened]]
"""(context manager) Opens a shard's file. Raises OSError; IsADirectoryError if it is something else."""


def read_shard(open_file: Open, version: int, rank: int) -> Any:
    """Returns the state that `write_shard` was given. Raises Damaged or OSError. The state is complete and comes from
    these two files alone. Memory is only allocated for data that the files contain."""
    with _opened(open_file, INDEX) as file:
        if file.size > INDEX_BYTES_MAX + 4096:
            raise Damaged(f"the index has {file.size} bytes")
        text = bytearray(file.size)
        _read(file, memoryview(text))
    index = parse_index(bytes(text))
    if (index.version, index.rank) != (version, rank):
        raise Damaged(f"it is version {index.version} of rank {index.rank}")
    with _opened(open_file, DATA) as file:
        if file.size != index.data_bytes:
            raise Damaged(f"{DATA} has {file.size} bytes instead of {index.data_bytes}")
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


@contextmanager
def _opened(open_file: Open, name: str) -> Iterator[Opened]:
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_file(name))
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ENXIO):
                raise
            raise Damaged(f"{name} is no file") from None
        yield file


def _check_head(file: Opened, index: Index) -> None:
    state, left = xxhash.xxh3_128(), index.head_bytes
    while left:
        part = bytearray(min(left, _PIECE_BYTES))
        _read(file, memoryview(part))
        state.update(part)
        left -= len(part)
    if state.hexdigest() != index.head_digest:
        raise Damaged(f"the header of {DATA} is not what its checksum says")


def _fill(file: Opened, tensor: torch.Tensor, piece: Piece) -> None:
    row_major = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
    state = xxhash.xxh3_128()
    for part in _parts(elements(row_major)):
        _read(file, part)
        state.update(part)
    if state.hexdigest() != piece.digest:
        raise Damaged(f"tensor {piece.name[:80]!r} is not what its checksum says")
    if row_major is not tensor:
        tensor.copy_(row_major)


def _read(file: Opened, into: memoryview) -> None:
    while len(into):
        got = file.read(into)
        if not got:
            raise Damaged("a file ends too early")
        into = into[got:]


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
