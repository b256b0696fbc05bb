"""The index of one rank's checkpoint: what is where, and nothing that could be executed.

::

    index.jsonl           line 1: {"swift_checkpoint": 1, "bytes": …, "xxh3_128": "…"}      of line 2
                          line 2: {"version", "rank", "data": {"bytes", "head_bytes", "head_xxh3_128"},
                                   "tensors": [{"name", "at", "bytes", "xxh3_128"} | {"name", "same_as"}, …],
                                   "state": the skeleton of swift.checkpoint.state}
    tensors.safetensors   8 bytes of length, a JSON header, the tensors' elements one after the other

So every byte of both files is under a checksum. A checksum finds accidents; who writes one for a file that he made
up is stopped by what is checked here before anything is allocated: the tensors are those that the skeleton
describes, of known element types, as long as type and shape say, and lie one behind the other to the end of the file.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from swift.checkpoint.dtypes import DTYPES

FORMAT = 1
INDEX = "index.jsonl"
DATA = "tensors.safetensors"

INDEX_BYTES_MAX = 64 << 20
"""Longer ones are neither written nor read: parsing takes ten times as much."""
_FIRST_LINE_MAX = 256
DEPTH_MAX = 300
"""Of the state: levels of JSON; a dict in another is three further down."""
_DIMENSIONS_MAX = 64


class Damaged(ValueError):
    """What is there is not what a rank writes; the message says what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The elements of one tensor in the data file: row-major, whatever its strides are in memory."""

    name: str
    at: int
    size: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """What `dump` writes and `parse` has checked."""

    version: int
    rank: int
    data_bytes: int
    """Of the data file, its head included."""
    head_bytes: int
    head_digest: str
    pieces: tuple[Piece, ...]
    same: Mapping[str, str]
    """Names of tensors that are another one, in the same memory -> that one."""
    state: Any
    memory_bytes: int = 0
    """What its tensors take when they are loaded."""


def digest(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def dump(index: Index) -> bytes:
    """Damaged: it would be longer than anybody reads."""
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


def parse(content: bytes) -> Index:
    """Damaged: it is not what `dump` writes."""
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
    described = _described(top["state"])
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
    """Damaged: nobody could read it again."""
    for _ in _leaves(skeleton, 0):
        pass


@dataclass(frozen=True, slots=True)
class _Described:
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size: int
    memory: int
    """With the gaps that its strides leave."""


def _described(skeleton: Any) -> dict[str, _Described]:
    """name -> what the skeleton says of the tensor, or of the array's bytes. What else it says is `join`'s to check."""
    described: dict[str, _Described] = {}
    for leaf in _leaves(skeleton, 0):
        name = leaf["tensor"] if "tensor" in leaf else leaf["array"]
        if not isinstance(name, str) or name in described:
            raise Damaged(f"two tensors are called {str(name)[:80]!r}")
        described[name] = _tensor(leaf, name) if "tensor" in leaf else _array(leaf, name)
    return described


def _tensor(leaf: Mapping[str, Any], name: str) -> _Described:
    if not {"tensor", "dtype", "shape"} <= leaf.keys() <= {"tensor", "dtype", "shape", "stride"}:
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
    return _Described(dtype, tuple(shape), tuple(stride), size, memory)


def _array(leaf: Mapping[str, Any], name: str) -> _Described:
    size = leaf.get("bytes")
    if type(size) is not int or not 0 <= size < _FAR:
        raise Damaged(f"array {name[:80]!r} has no size")
    _lengths(leaf.get("shape"), name)
    return _Described("array", (size,), (), size, size)


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


def _lengths(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or len(value) > _DIMENSIONS_MAX:
        raise Damaged(f"tensor {name[:80]!r} has no shape")
    if not all(type(length) is int and 0 <= length < _FAR for length in value):
        raise Damaged(f"tensor {name[:80]!r} has a shape that none can have")
    return value


# --- JSON of unknown origin ---


def _json(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise Damaged("the index is nested too deep") from None
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"the index is no JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value_of = dict(pairs)
    if len(value_of) != len(pairs):
        raise Damaged("the index has a key twice")
    return value_of


def _fields(value: Any, what: str, **kinds: type) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        raise Damaged(f"{what} has other fields than {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(value[name], kind) or (kind is int and isinstance(value[name], bool)):
            raise Damaged(f"{what}: {name} is of another type")
    return value
