"""`kernels.cpp` from Python: inverts a cluster's step in one pass, for contiguous tensors of a CPU or a device.

Other tensors, and machines without a compiler, are served by copies (`swift_ft.state.exact_undo.PreImage`).
"""

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from swift_ft.device import Accelerator, accelerator_of

DTYPES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
}
"""Element types whose steps can be inverted, with the integers of their size."""


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


ROOM = 1024
"""Minimum number of values that do not fit into their codes, for which there is room."""
MOST = 3
"""Maximum number of columns of a parameter: itself and its state."""
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
INVERT, RECORD, UNDO = range(3)
SOURCE = Path(__file__).with_name("kernels.cpp")
ENV_OFF = "SWIFT_NO_NATIVE"
"""Environment variable; 1: steps are taken back by copies."""


class Form(IntEnum):
    """The rules of `kernels.cpp`. `inverse_step` gives their constants, in the order of the constructors."""

    SGD = 0
    MOMENTUM = 1
    ADAM = 2
    LION = 3


Backwards = tuple[Form, tuple[float, ...]]
"""The inverse of a step: a rule and its constants."""


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


class Pass:
    """The arguments of one call: tensors of one cluster, and the constants of their step.

    `columns`: live tensors by kind, the parameters first. The first `kept` are computed, the others only read.
    """

    def __init__(
        self,
        backwards: Backwards,
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
        self, codes: Sequence[torch.Tensor], escapes: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        for index, code in enumerate(codes):
            self._call.codes[index] = code.data_ptr()
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
        codes: Sequence[torch.Tensor],
        escapes: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> list[int]:
        """Writes the residue that the inverse step leaves of `old`; the live tensors do not change. Returns each
        column's number of escapes. If that exceeds the room, codes and escapes of the column are invalid.

        `codes`: of each column, [N] int8. `escapes`: room by column for positions in the flat cluster, [R] int32, and
        the old values there, [R].
        """
        for index, column in enumerate(old):
            self._call.table.old[index] = self._addresses(column)
        self._call.room = escapes[0][0].numel()
        self._point_at(codes, escapes)
        self._run(RECORD)
        return list(self._call.counts[: len(old)])

    def undo(
        self, codes: Sequence[torch.Tensor], escapes: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Restores the bits before the step, in place, from the output of `record`."""
        self._point_at(codes, escapes)
        self._run(UNDO)
        self._mark_changed()

    def _mark_changed(self) -> None:
        for column in self._columns[: self._call.kept]:
            torch.autograd.graph.increment_version(column)


# On a device: one launch for each tensor, in the current stream.

DEVICE_TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "Bfloat16"}
"""Element types of `kernels.cpp` for a device."""
_DOUBLES = 10
"""Constants that the device's kernel takes."""
_BLOCK, _GRID_MAX = 256, 4096


@functools.cache
def _device_kernel(accelerator: Accelerator, form: Form, dtype: torch.dtype) -> Callable[..., None] | None:
    if os.environ.get(ENV_OFF) == "1" or dtype not in DEVICE_TYPES:
        return None
    return accelerator.compile(device_source(form, dtype), "swift_codes")


def device_source(form: Form, dtype: torch.dtype) -> str:
    """Returns the C++ of the kernel `swift_codes` for steps of one form on one element type."""
    names = {"DEVICE": "", "TYPE": DEVICE_TYPES[dtype], "RULE": form.name.capitalize()}
    return "".join(f"#define SWIFT_{key} {value}\n" for key, value in names.items()) + SOURCE.read_text()


def device_knows(device: torch.device, form: Form, dtype: torch.dtype) -> bool:
    """Returns whether `DeviceCodes` can be made there. Compiles the kernel at the first call."""
    return _device_kernel(accelerator_of(device), form, dtype) is not None


class DeviceCodes:
    """What steps of a cluster on a device, computed backwards, miss of the old values. Nothing here waits.

    `columns`: live tensors by kind, after the step; `old`: before it, of the first kinds, or of all.
    """

    def __init__(
        self,
        backwards: Backwards,
        gradients: Sequence[torch.Tensor],
        columns: Sequence[Sequence[torch.Tensor]],
        old: Sequence[Sequence[torch.Tensor]],
    ):
        form, constants = backwards
        first = columns[0][0]
        kernel = _device_kernel(accelerator_of(first.device), form, first.dtype)
        assert kernel is not None
        self._kernel = kernel
        self._constants = [*constants, *[0.0] * (_DOUBLES - len(constants))]
        self._gradients, self._columns = gradients, columns
        self._total = sum(tensor.numel() for tensor in gradients)
        self._room = max(ROOM, self._total // 64)
        kept = len(old)
        self._codes = first.new_empty((kept, self._total), dtype=torch.int8)
        self._where = first.new_empty((kept, self._room), dtype=torch.int32)
        self._values = first.new_empty((kept, self._room))
        counts = first.new_zeros(kept, dtype=torch.int32)
        self._launch(RECORD, old, counts)
        accelerator = accelerator_of(first.device)
        self._counts = accelerator.pinned(kept, torch.int32)
        self._counts.copy_(counts, non_blocking=True)
        self._counted = accelerator.mark()

    def _launch(self, task: int, old: Sequence[Sequence[torch.Tensor]], counts: torch.Tensor) -> None:
        flat, kept = 0, self._codes.shape[0]
        for index, gradient in enumerate(self._gradients):
            if not (numel := gradient.numel()):
                continue
            live = [column[index] for column in self._columns]
            before = [column[index] for column in old]
            self._kernel(
                grid=(min(-(-numel // _BLOCK), _GRID_MAX), 1, 1),
                block=(_BLOCK, 1, 1),
                args=[
                    *(task, kept, numel, flat, self._total, self._room, gradient),
                    *(live + [gradient] * (MOST - len(live))),
                    *(before + [gradient] * (MOST - len(before))),
                    *(self._codes, self._where, self._values, counts, *self._constants),
                ],
            )
            flat += numel

    @property
    def bytes(self) -> int:
        return self._codes.nbytes + self._where.nbytes + self._values.nbytes

    @property
    def counted(self) -> bool:
        """Returns whether the device has come so far that `fit` is known."""
        return self._counted.query()

    def fit(self) -> bool:
        """(when `counted`) Returns whether the codes suffice. If not, only copies lead back. Gives up unused room."""
        counts = self._counts.tolist()
        if max(counts) > self._room:
            return False
        self._where, self._values = (
            tensor[:, : max(counts)].clone() for tensor in (self._where, self._values)
        )
        return True

    def undo(self) -> None:
        """(if they `fit`) Restores the old bits, in place."""
        self._launch(UNDO, (), self._codes)
        for column, where, values, count in zip(
            self._columns, self._where, self._values, self._counts.tolist(), strict=False
        ):
            flat = torch.cat([tensor.reshape(-1) for tensor in column])
            flat[where[:count].long()] = values[:count]
            for tensor, whole in zip(
                column, torch.split(flat, [tensor.numel() for tensor in column]), strict=True
            ):
                tensor.copy_(whole.view_as(tensor))
