"""`kernels.cpp` from Python: inverts a cluster's step in one pass, for contiguous tensors of a CPU.

`inverse_step` computes the same in several passes. It serves devices other than the CPU, and installations without a
C++ compiler.
"""

import ctypes
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from swift_ft.state.optimizer_names import is_plain_memory

# A bucket's tensors as flat pieces that fit into the cache, so that many operations cost one pass over memory.
#
# Legend: N elements of a unit; columns are the parameter (0) and its state (1, 2, …).

CACHED = 1 << 17
"""Elements per thread of a CPU. All columns of a unit stay in the last-level cache, and the start of an operation is a
small part of its time (smaller units, for the second-level cache, were slower: measured)."""
ALONE = 1 << 13
"""Elements from which a tensor gets units of its own. Smaller ones are packed: starts of operations would dominate."""
ON_DEVICE = 1 << 22
"""Elements per unit on other devices: large enough for launches not to matter."""
ROUND = 8
"""Bytes to which lengths are rounded up where bytes are processed by the word."""

DTYPES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
"""Element types whose steps can be inverted, with the integers of their size."""


def unit_size(device: torch.device) -> int:
    return CACHED * min(torch.get_num_threads(), 16) if device.type == "cpu" else ON_DEVICE


class Unit:
    """N elements: a piece of one tensor, or several small tensors one after another."""

    def __init__(self, numel: int, gradient: list[torch.Tensor], columns: list[list[torch.Tensor]]):
        self.numel = numel
        self._gradient = gradient
        self._columns = columns
        self.direct = len(gradient) == 1 and all(c[0].is_contiguous() for c in [gradient, *columns])
        """True if columns are views into the live tensors."""

    @property
    def width(self) -> int:
        return len(self._columns)

    def gradient(self) -> torch.Tensor:
        return _one(self._gradient)

    def column(self, index: int) -> torch.Tensor:
        """Returns [N], a view if the unit is direct, else a copy."""
        return _one(self._columns[index])

    def copy_column(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """Copies [N] into `out`."""
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
    """Returns, per parameter, whether it can be computed in place because all its tensors are contiguous."""
    return [all(tensor.is_contiguous() for tensor in tensors) for tensors in zip(*columns, strict=True)]


def cut(
    gradients: Sequence[torch.Tensor], columns: Sequence[Sequence[torch.Tensor]], flat: Sequence[bool]
) -> list[Unit]:
    """Cuts tensors of one dtype and device into units; each column has one tensor per parameter.

    Equal sizes, `flat` and number of threads give equal units, so that computations over them are repeatable.
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
    """Buffers by name that are reused in every step: fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    def get(
        self, name: tuple[object, ...], numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns a buffer [numel] with arbitrary content."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype or buffer.device != device:
            buffer = self._buffers[name] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel]

    def bytes_of(self, *kinds: str) -> int:
        """Returns the bytes of the buffers whose names begin with one of these words."""
        held = [buffer for name, buffer in self._buffers.items() if name[0] in kinds]
        return sum(buffer.numel() * buffer.element_size() for buffer in held)


MOST = 4
"""Maximum number of columns of a parameter: itself and its state."""
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
INVERT, RECORD, UNDO = range(3)
SOURCE = Path(__file__).with_name("kernels.cpp")
ENV_OFF = "SWIFT_NO_NATIVE"
"""Environment variable; 1: compute with torch's operations alone."""


class Form(IntEnum):
    """The rules of `kernels.cpp`. `inverse_step` gives their constants, in the order of the constructors."""

    SGD = 0
    MOMENTUM = 1
    ADAM = 2
    NADAM = 3
    LION = 4
    ADAGRAD = 5
    RMSPROP = 6
    RMSPROP_MOMENTUM = 7
    RMSPROP_CENTERED = 8
    RMSPROP_MOMENTUM_CENTERED = 9
    ADADELTA = 10


class _Place(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("shift", ctypes.c_int32), ("half", ctypes.c_int32))


class _Table(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.c_int64),
        ("sizes", ctypes.c_void_p),
        ("gradients", ctypes.c_void_p),
        ("columns", ctypes.c_void_p * MOST),
        ("old", ctypes.c_void_p * MOST),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("task", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("sane", ctypes.c_int32),
        ("kept", ctypes.c_int32),
        ("team", ctypes.c_void_p),
        ("constants", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("codes", ctypes.c_void_p * MOST),
        ("table", _Table),
        ("room", ctypes.c_int64),
        ("where", ctypes.c_void_p * MOST),
        ("values", ctypes.c_void_p * MOST),
        ("counts", ctypes.c_int64 * MOST),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the library for this CPU; None if it was not built from this source, or is switched off."""
    if os.environ.get(ENV_OFF) == "1":
        return None
    name = torch.backends.cpu.get_cpu_capability().lower()
    for candidate in dict.fromkeys((name, "avx2" if name == "avx512" else "default")):
        try:
            loaded = ctypes.CDLL(str(SOURCE.with_name(f"_kernels_{candidate}.so")))
            loaded.swift_optim_source.restype = ctypes.c_char_p
            if loaded.swift_optim_source() == hashlib.sha256(SOURCE.read_bytes()).hexdigest().encode():
                return loaded
        except (OSError, AttributeError):
            continue  # missing, or built for another system, or outdated
    return None


@functools.cache
def _team() -> int | None:
    """Returns the address of GOMP_parallel in the OpenMP that torch has loaded; None for another OpenMP, or none."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def available(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether `Pass` supports these tensors of one dtype."""
    first, kernels = tensors[0], library()
    return (
        kernels is not None
        and first.device.type == "cpu"
        and first.dtype in TYPES
        and (first.dtype != torch.float16 or bool(kernels.swift_optim_knows_half()))
        and all(map(is_plain_memory, tensors))
        and sum(tensor.numel() for tensor in tensors) < 1 << 31
    )


class Pass:
    """The arguments of one call: tensors of one cluster, and the constants of their step.

    `columns`: live tensors by kind, the parameters first. The first `kept` are computed, the others only read.
    """

    def __init__(
        self,
        backwards: tuple[Form, Sequence[float]],
        gradients: Sequence[torch.Tensor],
        columns: Sequence[Sequence[torch.Tensor]],
        *,
        kept: int,
        sane: bool,
    ):
        form, constants = backwards
        self._columns = columns
        self._hold: list[object] = [gradients, columns]  # objects that the call points to
        self._call = call = _Call(rule=form, dtype=TYPES[gradients[0].dtype], kept=kept, sane=sane)
        call.threads = torch.get_num_threads()
        call.team = _team()
        call.constants = self._keep((ctypes.c_double * len(constants))(*constants))
        call.table.tensors = len(gradients)
        call.table.sizes = self._keep((ctypes.c_int64 * len(gradients))(*[g.numel() for g in gradients]))
        call.table.gradients = self._addresses(gradients)
        for index, column in enumerate(columns):
            call.table.columns[index] = self._addresses(column)

    def _keep(self, array: Any) -> int:
        self._hold.append(array)
        return ctypes.addressof(array)

    def _addresses(self, tensors: Sequence[torch.Tensor]) -> int:
        return self._keep((ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors]))

    def _run(self, task: int) -> None:
        self._call.task = task
        kernels = library()
        assert kernels is not None
        if kernels.swift_optim_run(ctypes.byref(self._call)) != 0:
            raise RuntimeError("kernels.cpp knows no such rule or type")

    def _point_at(
        self,
        layout: Sequence[tuple[int, ...]],
        codes: Sequence[torch.Tensor],
        escapes: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        places = (_Place * MOST)()
        for index, (shared, code) in enumerate(zip(layout, codes, strict=True)):
            self._call.codes[index] = code.data_ptr()
            for place, column in enumerate(shared):
                places[column] = _Place(index, 4 * place, len(shared) > 1)
        self._call.places = self._keep(places)
        ctypes.memset(self._call.counts, 0, ctypes.sizeof(self._call.counts))
        for column, (where, values) in escapes.items():
            self._call.where[column] = where.data_ptr()
            self._call.values[column] = values.data_ptr()
            self._call.counts[column] = where.numel()
        self._hold += [codes, escapes]

    def invert(self) -> int:
        """Restores the state before the step, in place. Returns the number of non-finite parameter elements."""
        self._run(INVERT)
        self._mark_changed()
        return int(self._call.counts[0])

    def record(
        self,
        old: Sequence[Sequence[torch.Tensor]],
        layout: Sequence[tuple[int, ...]],
        codes: Sequence[torch.Tensor],
        escapes: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> list[int]:
        """Writes the residue that the inverse step leaves of `old`; the live tensors do not change. Returns each
        column's number of escapes. If that exceeds the room, codes and escapes of the column are invalid.

        `layout` names the columns that share each of `codes`, [N] int8. `escapes`: room by column for positions in
        the flat cluster, [R] int32, and the old values there, [R].
        """
        for index, column in enumerate(old):
            self._call.table.old[index] = self._addresses(column)
        self._call.room = escapes[0][0].numel()
        self._point_at(layout, codes, escapes)
        self._run(RECORD)
        return list(self._call.counts[: len(old)])

    def undo(
        self,
        layout: Sequence[tuple[int, ...]],
        codes: Sequence[torch.Tensor],
        escapes: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Restores the bits before the step, in place, from the output of `record`."""
        self._point_at(layout, codes, escapes)
        self._run(UNDO)
        self._mark_changed()

    def _mark_changed(self) -> None:
        """Increments the tensors' versions for autograd, which does not see changes by the library."""
        for column in self._columns[: self._call.kept]:
            torch.autograd.graph.increment_version(column)
