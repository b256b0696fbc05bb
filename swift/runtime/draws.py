"""What loaders give in one step (*draws*), as bytes: for ranks that cannot make these loaders (`fetch_batches`).

They consist of what a state may consist of (`swift.checkpoint.state`): nothing is pickled.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash

from swift.checkpoint.state import join, leaves, split
from swift.errors import UsageError
from swift.runtime.manifest import torch_dtype
from swift.runtime.tensors import byte_view, plain

Given = TypeVar("Given")
Drawn = Sequence[Sequence[bytes]]
"""From each loader, in a step of a rank's own."""
_SIZE_BYTES = 8


class Draw(NamedTuple):
    """What a loader has given once."""

    what: str
    """"next", "iter", or the name of what was asked for: a method, an attribute."""
    value: Any
    ended: bool = False
    """It has raised StopIteration instead."""


class Draws:
    """Of one loader: written down where it is made, and given again where it is not."""

    def __init__(self) -> None:
        self.written: list[bytes] | None = None
        """In the step under way. None: nobody needs it."""
        self._fetched: dict[int, Sequence[bytes]] = {}
        self._left: Iterator[bytes] = iter(())

    def take(self, origin: int, draws: Sequence[bytes]) -> None:
        """Of the step that is about to begin, by a rank of this data-parallel rank."""
        self._fetched[origin] = draws

    def begin(self, origin: int) -> None:
        """A step is computed for it."""
        self._left = iter(self._fetched[origin])

    def noted(self, what: str, give: Callable[[], Given]) -> Given:
        """What `give` gives."""
        if self.written is None:
            return give()
        try:
            value = give()
        except StopIteration:
            self.written.append(packed(Draw(what, None, ended=True)))
            raise
        self.written.append(packed(Draw(what, value)))
        return value

    def given(self, what: str, origin: int) -> Any:
        """The next one. Raises UsageError if a rank of that origin has drawn something else."""
        data = next(self._left, None)
        draw = Draw("nothing", None) if data is None else unpacked(data)
        if draw.what != what:
            raise UsageError(
                f"a step for data-parallel rank {origin} asks its loader for {what!r} where a rank of its own has "
                f"asked for {draw.what!r}: with fetch_batches=True all ranks draw the same, in the same order, before "
                "they call the schedule"
            )
        if draw.ended:
            raise StopIteration
        return draw.value


def packed(draw: Draw) -> bytes:
    """As it is now: the trainer may change a batch in place. A tensor goes without the rest of the memory that it is a
    view of. Raises UsageError for what cannot be sent."""
    try:
        tensors, skeleton = split(draw.value, "batch")
        if sparse := [path for path, tensor in tensors.items() if tensor.layout is not torch.strided]:
            raise UsageError(f"the tensor at {sparse[0]} is sparse; make it dense")
        devices = {path: tensor.device.type for path, tensor in tensors.items()}
        parts = [bytes(byte_view(plain(tensor))) for tensor in tensors.values()]
        data = _framed({"what": draw.what, "ended": draw.ended, "value": skeleton, "devices": devices}, parts)
        arrives = join(json.loads(json.dumps(skeleton)), tensors)
        lost = _kinds(draw.value) - _kinds(arrives)
    except UsageError as error:
        raise UsageError(
            f"{draw.what!r} of a loader, with fetch_batches=True: the batch is sent to other ranks, and {error}"
        ) from None
    if lost:
        raise UsageError(
            f"{draw.what!r} of a loader, with fetch_batches=True: the batch is sent to other ranks, where a "
            f"{min(kind.__name__ for kind in lost)} would become something simpler; make it a tuple, a list or a dict"
        )
    return data


def unpacked(data: bytes) -> Draw:
    """As it was, on devices of the same type."""
    told, parts = _parts(data)
    tensors = {}
    for leaf, part in zip(leaves(told["value"]), parts, strict=True):
        path = leaf["tensor"] if "tensor" in leaf else leaf["array"]
        tensors[path] = _tensor(part, leaf).to(told["devices"][path])
    return Draw(told["what"], join(told["value"], tensors), told["ended"])


def message(drawn: Drawn) -> bytes:
    """To another rank."""
    return _framed([len(of_one) for of_one in drawn], [data for of_one in drawn for data in of_one])


def read(data: bytes) -> Drawn:
    """Of a `message`."""
    counts, parts = _parts(data)
    left = iter(parts)
    return [[next(left) for _ in range(count)] for count in counts]


def digest(drawn: Drawn) -> bytes:
    """Equal where the values are."""
    return xxhash.xxh3_128_digest(message(drawn))


# --- ---


def _framed(told: Any, parts: Sequence[bytes]) -> bytes:
    head = json.dumps({"told": told, "sizes": [len(part) for part in parts]}).encode()
    return b"".join((len(head).to_bytes(_SIZE_BYTES, "little"), head, *parts))


def _parts(data: bytes) -> tuple[Any, list[bytes]]:
    at = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "little")
    head, parts = json.loads(data[_SIZE_BYTES:at]), []
    for size in head["sizes"]:
        parts.append(data[at : at + size])
        at += size
    return head["told"], parts


def _tensor(data: bytes, leaf: dict[str, Any]) -> torch.Tensor:
    """`leaf`: what its skeleton says of it."""
    if "array" in leaf:
        return torch.tensor(bytearray(data), dtype=torch.uint8)
    made = torch.empty(leaf["shape"], dtype=torch_dtype(leaf["dtype"]))
    byte_view(made)[:] = np.frombuffer(data, dtype=np.uint8)
    stride = leaf.get("stride")
    return torch.empty_strided(made.shape, stride, dtype=made.dtype).copy_(made) if stride else made


def _kinds(value: Any) -> set[type]:
    """Of what it consists of."""
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | deque):
        inner = value
    return {type(value)}.union(*map(_kinds, inner))
