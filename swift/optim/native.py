"""`kernels.cpp` from Python: a cluster's step computed backwards in one pass, for contiguous tensors of a CPU.

What it computes is what `rules` computes in several passes; see there for devices other than the CPU, and for
installations that found no C++ compiler.
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

from swift.optim.torch_names import is_plain_memory

MOST = 4
"""Columns of a parameter: itself and its state."""
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
INVERT, RECORD, UNDO = range(3)
SOURCE = Path(__file__).with_name("kernels.cpp")
ENV_OFF = "SWIFT_NO_NATIVE"
"""Set to 1: compute with torch's operations alone."""


class Form(IntEnum):
    """The rules of `kernels.cpp`. `rules` gives their constants, in the order in which the constructors take them."""

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
    """The one for this CPU; None if it was not built here from this very source, or is switched off."""
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
            continue  # not there, or built for another system, or long ago
    return None


@functools.cache
def _team() -> int | None:
    """Address of GOMP_parallel in the OpenMP that torch has loaded; None: another OpenMP, or none."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def available(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these tensors of one dtype can be computed by `Pass`."""
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
    """One call's arguments: tensors of one cluster, and the constants of their step.

    `columns` are the live tensors by kind, the parameters first; `kept` of them are computed, the others read.
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
        self._hold: list[object] = [gradients, columns]  # what the call points to
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
        """The state before the step, in place. Returns how many elements of parameters are not finite."""
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
        """Writes what the computation backwards misses of `old`; the live tensors stay. Returns each column's
        number of escapes: where it is more than there is room for, codes and escapes of the column mean nothing.

        `layout` names the columns that share each of `codes`, [N] int8. `escapes` is room by column: positions in
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
        """The bits before the step, in place, from what `record` has written."""
        self._point_at(layout, codes, escapes)
        self._run(UNDO)
        self._mark_changed()

    def _mark_changed(self) -> None:
        """For autograd, which does not see what happens here."""
        for column in self._columns[: self._call.kept]:
            torch.autograd.graph.increment_version(column)
