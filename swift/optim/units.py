"""A bucket's tensors as flat pieces of a size that stays in the cache, so that many operations cost one pass.

Legend: N elements of a unit; columns are the parameter (0) and its state (1, 2, …).
"""

from collections.abc import Sequence

import torch

CACHED = 1 << 17
"""Elements per thread of a CPU: all columns of a unit stay in the last-level cache, and starting an operation is
little of its time (smaller units, for the second-level cache, were slower: measured)."""
ALONE = 1 << 13
"""Smaller tensors are computed together, in a copy: starting operations on each would cost more."""
ON_DEVICE = 1 << 22
"""Elements per unit elsewhere: large enough for launches not to matter."""
ROUND = 8
"""Lengths are rounded up to this where bytes are looked at by the word."""

DTYPES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
"""Element types that can be computed backwards, with the integers of their size."""


def unit_size(device: torch.device) -> int:
    return CACHED * min(torch.get_num_threads(), 16) if device.type == "cpu" else ON_DEVICE


class Unit:
    """N elements: a piece of one tensor, or several small tensors one after another."""

    def __init__(self, numel: int, gradient: list[torch.Tensor], columns: list[list[torch.Tensor]]):
        self.numel = numel
        self._gradient = gradient
        self._columns = columns
        self.direct = len(gradient) == 1 and all(c[0].is_contiguous() for c in [gradient, *columns])
        """Columns are views into the live tensors."""

    @property
    def width(self) -> int:
        return len(self._columns)

    def gradient(self) -> torch.Tensor:
        return _one(self._gradient)

    def column(self, index: int) -> torch.Tensor:
        """[N]. A view if the unit is direct, else a copy."""
        return _one(self._columns[index])

    def copy_column(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """[N] into `out`."""
        return torch.cat([tensor.reshape(-1) for tensor in self._columns[index]], out=out)

    def store(self, index: int, values: torch.Tensor) -> None:
        """Writes [N] back into the live tensors."""
        at = 0
        for tensor in self._columns[index]:
            size = tensor.numel()
            tensor.copy_(values[at : at + size].view(tensor.shape))
            at += size


def _one(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def direct(*columns: Sequence[torch.Tensor]) -> list[bool]:
    """Which parameters can be computed where they lie, all their tensors being contiguous."""
    return [all(tensor.is_contiguous() for tensor in tensors) for tensors in zip(*columns, strict=True)]


def cut(
    gradients: Sequence[torch.Tensor], columns: Sequence[Sequence[torch.Tensor]], flat: Sequence[bool]
) -> list[Unit]:
    """Units over tensors of one dtype and device; each column has one tensor per parameter.

    The same sizes, `flat` and number of threads give the same units: what is computed over them is repeatable.
    """
    units: list[Unit] = []
    small: list[int] = []
    total = 0

    def pack() -> None:
        nonlocal total
        if small:
            units.append(Unit(total, [gradients[i] for i in small], [[c[i] for i in small] for c in columns]))
        small.clear()
        total = 0

    for index, gradient in enumerate(gradients):
        size, numel = unit_size(gradient.device), gradient.numel()
        if numel >= ALONE and flat[index]:
            every = [gradient, *(column[index] for column in columns)]
            pieces = zip(*(torch.split(tensor.reshape(-1), size) for tensor in every), strict=True)
            units += [Unit(piece[0].numel(), [piece[0]], [[t] for t in piece[1:]]) for piece in pieces]
        elif numel:
            if total + numel > size:
                pack()
            small.append(index)
            total += numel
    pack()
    return units


class Pool:
    """Buffers that are used again in every step, by name: fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    def take(
        self, name: tuple[object, ...], numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """[numel], with what was left in it."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype or buffer.device != device:
            buffer = self._buffers[name] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel]

    def bytes_of(self, *kinds: str) -> int:
        """Bytes of the buffers whose names begin with one of these words."""
        held = [buffer for name, buffer in self._buffers.items() if name[0] in kinds]
        return sum(buffer.numel() * buffer.element_size() for buffer in held)
