"""What tells cheaply that a value has changed: numbers themselves, small tensors' bytes, large ones' ends and version.

A sign is made of each leaf of a value, by its path (``hidden.0.mean``); what a container has besides its items (how
many there are, in which order) has a path that begins with ``#``. Long containers have one sign for all of their items
(`swift.runtime.bulk`). Things of which nothing can be told (locks, handles, files that are written) have none.
"""

import array
import contextvars
import ctypes
import io
import itertools
import logging
import multiprocessing.shared_memory
import multiprocessing.sharedctypes
import operator
import random
import threading
import types
import warnings
import weakref
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash

from swift.runtime import _torch, bulk
from swift.runtime.before import attributes_of, generator_state, look, memory_of, plain_tensor
from swift.runtime.tensors import byte_view, plain

# Observers, whose state no step depends on; and what has a home of its own.
_OBSERVERS = {
    "aim", "asyncio", "comet_ml", "concurrent", "io", "_io", "logging", "mlflow", "multiprocessing", "neptune", "rich",
    "socket", "swift", "tensorboard", "tensorboardX", "threading", "_thread", "tqdm", "wandb",
}  # fmt: skip
_TORCH_OBSERVERS = (
    "torch._C", "torch._dynamo", "torch._inductor", "torch.distributed", "torch.multiprocessing", "torch.profiler",
    "torch.autograd.profiler", "torch.utils.hooks", "torch.utils.tensorboard",
)  # fmt: skip
_LOOKED_INTO = {"builtins", "collections", "contextvars", "itertools", "multiprocessing", "weakref"}
_INERT = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, logging.Logger,
    torch.dtype, torch.device, torch.Size, range, slice, ctypes.CDLL,
)  # fmt: skip
_MAPPINGS = (
    dict, types.MappingProxyType, ChainMap, UserDict, weakref.WeakKeyDictionary, weakref.WeakValueDictionary,
)  # fmt: skip
"""Others may load what they give from a file."""
_BUFFERS = (
    bytearray, array.array, memoryview, ctypes.Array, ctypes.Structure, ctypes.Union, type(ctypes.c_int()).__mro__[1],
)  # fmt: skip
_COMPILERS = "_dynamo"
"""How attributes begin that torch.compile gives to tensors."""
_SMALL_BYTES = 1 << 20
"""Of tensors; of arrays, which have no version:"""
_ARRAY_BYTES = 16 << 20
_MANY = 256
_ENDS = 8
_DEEP = 40
LEAVES_MAX = 20_000
"""Of one variable."""
_QUICK_LEAVES_MAX = 1_000
_QUICK_ITEMS_MAX = 4_096
_SPECIAL = (
    torch.Tensor, torch.nn.Module, torch.Generator, np.ndarray, np.generic, np.random.RandomState, np.random.Generator,
    random.Random, Enum, PurePath, io.IOBase, list, tuple, deque, set, frozenset, weakref.ref, contextvars.ContextVar,
    threading.local, threading.Thread, multiprocessing.sharedctypes.SynchronizedBase,
    multiprocessing.shared_memory.SharedMemory, *_BUFFERS, *_MAPPINGS, *_INERT,
)  # fmt: skip
"""There is more to them than their attributes."""

Sign = Any
Signs = dict[str, Sign]
Reads = Callable[[type, str], bool]


def everything(_class: type, _attribute: str) -> bool:
    """`Reads` of whoever looks at all of a value."""
    return True


class Look:
    """One look at several values. ``told``: ids of what needs no sign; ``reads(class, attribute)``: somebody looks at
    it; ``memory``: tensors that lie there (``p.data``, ``model.state_dict()``) need none either. ``quick``: what is
    large has a sign that equals no other."""

    def __init__(
        self, told: set[int], reads: Reads, memory: Set[int] = frozenset(), *, quick: bool = False
    ) -> None:
        self.signs: Signs = {}
        self._quick = quick
        self._kinds: dict[type, tuple[str, ...] | None] = {}
        """Of ordinary classes, the attributes that are in slots; None: it is not one."""
        self._told = told
        self._reads = reads
        self._memory = memory
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # what is made while looking, so that no id is used twice
        self._leaves_max = 0

    def variable(self, name: str, value: Any) -> None:
        """One variable does not hide what stands behind it, however large it is."""
        self._leaves_max = len(self.signs) + (_QUICK_LEAVES_MAX if self._quick else LEAVES_MAX)
        self.at(f"{name}\0", value)

    def at(self, path: str, value: Any, depth: int = 0) -> None:
        """Makes the signs of `value` and of all that it refers to, at `path`; what is known or told needs none."""
        if value is None or isinstance(value, bool | int | str | bytes | float | complex):
            # (NaN is equal to itself here.)
            self.signs[path] = repr(value) if isinstance(value, float | complex) else value
            return
        if isinstance(value, _INERT) or id(value) in self._told or id(value) in self._seen:
            return
        if depth > _DEEP or len(self.signs) > self._leaves_max:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if (
            self._memory
            and isinstance(value, torch.Tensor)
            and not memory_of([value]).isdisjoint(self._memory)
        ):
            return
        if self._quick and isinstance(value, np.ndarray) and value.nbytes > _SMALL_BYTES:
            self.signs[path] = object()
            return
        slots = self._slots_of(type(value))
        sign = leaf(value) if slots is None else None
        if sign is not None:
            self.signs[path] = sign
            if not isinstance(value, torch.Tensor) or not vars(value):
                return
        with suppress(Exception):  # anything may come out of somebody else's `__getattr__` or `__len__`
            for name, part in self._parts_of(value, slots):
                self.at(f"{path}.{name}", part, depth + 1)
            if isinstance(value, (list, tuple, deque, *_MAPPINGS)) and len(value) > _MANY:
                large = self._quick and len(value) > _QUICK_ITEMS_MAX
                self.signs[f"{path}.#rest"] = object() if large else bulk.digest(value, self._in_bulk)

    def _in_bulk(self, value: Any) -> Any:
        """(bulk) What stands for an object in a long container: its sign, or its parts."""
        slots = self._slots_of(type(value))
        if id(value) in self._told or (slots is None and isinstance(value, _INERT)):
            return None
        sign = leaf(value) if slots is None else None
        return dict(self._parts_of(value, slots)) if sign is None else sign

    def _parts_of(self, value: Any, slots: tuple[str, ...] | None) -> Iterator[tuple[str, Any]]:
        return parts_of(value, self._reads) if slots is None else _attributes(value, self._reads, slots)

    def _slots_of(self, kind: type) -> tuple[str, ...] | None:
        """Data sets have hundreds of thousands of objects of one class: it is looked at once."""
        if kind not in self._kinds:
            self._kinds[kind] = _slots(kind) if _is_ordinary(kind) else None
        return self._kinds[kind]


def leaf(value: Any) -> Sign:
    """The sign of what has no parts; None: it has."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return _of_array(value)
    if isinstance(value, _BUFFERS):
        return _of_buffer(value)
    if isinstance(value, Enum | PurePath):
        return str(value)
    if isinstance(value, io.IOBase):
        return _of_file(value)
    if (state := generator_state(value)) is not None:
        return _of_state(state[0]())
    return None


def parts_of(value: Any, reads: Reads) -> Iterator[tuple[str, Any]]:
    """What a container, an iterator, a module or another object consists of. `reads(class, attribute)`: it
    counts."""
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    if isinstance(value, torch.Tensor):
        yield from ((name, part) for name, part in vars(value).items() if not name.startswith(_COMPILERS))
    elif isinstance(value, _MAPPINGS):
        yield from _of_mapping(value)
    elif isinstance(value, list | tuple | deque):
        yield "#length", len(value)
        yield from _ends(value)
    elif isinstance(value, set | frozenset):
        yield "#length", len(value)
        yield "#items", sorted(map(repr, value)) if len(value) <= _MANY else hash(frozenset(value))
    elif isinstance(value, torch.nn.Module):
        yield from _of_module(value, reads)
    elif isinstance(value, types.GeneratorType | types.AsyncGeneratorType | types.CoroutineType):
        yield from _of_frame(value)
    elif isinstance(value, weakref.ref):
        yield "", value()
    elif isinstance(value, contextvars.ContextVar):
        yield "", value.get(None)
    elif isinstance(value, multiprocessing.sharedctypes.SynchronizedBase):
        yield "", value.get_obj()
    elif isinstance(value, multiprocessing.shared_memory.SharedMemory):
        yield "", value.buf
    elif isinstance(value, threading.local):
        yield from vars(value).items()
    elif isinstance(value, threading.Thread):
        own = vars(threading.Thread())
        yield from ((name, part) for name, part in vars(value).items() if name not in own)
    elif root in ("itertools", "builtins"):
        yield from _of_iterator(value)
    if isinstance(value, torch.Tensor | torch.nn.Module) or root in _LOOKED_INTO or root in _OBSERVERS:
        return
    if not kind.__module__.startswith(_TORCH_OBSERVERS):
        yield from _attributes(value, reads, _slots(kind))


def _is_ordinary(kind: type) -> bool:
    """Its objects are what their attributes are."""
    root = kind.__module__.partition(".")[0]
    return not (
        root in _LOOKED_INTO
        or root in _OBSERVERS
        or kind.__module__.startswith(_TORCH_OBSERVERS)
        or issubclass(kind, _SPECIAL)
        or any("__class__" in vars(each) for each in kind.__mro__[:-1])  # it says that it is another
    )


def _of_mapping(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    yield "#length", len(value)
    try:
        if len(value) <= _MANY:
            items = list(value.items())
            yield "#order", [key if isinstance(key, str | int) else id(key) for key, _ in items]
        else:
            keys = list(itertools.islice(value, _ENDS))
            keys += list(itertools.islice(reversed(value), _ENDS)) if hasattr(value, "__reversed__") else []
            items = [(key, value[key]) for key in keys]
        for number, (key, item) in enumerate(items):
            yield (key if isinstance(key, str) else str(number)), item
            if not isinstance(key, str | torch.Tensor):
                yield f"{number}.key", repr(key)
    except RuntimeError:  # another thread changes it
        return


def _ends(value: Any) -> Iterator[tuple[str, Any]]:
    count = len(value)
    places: Iterable[int] = range(count)
    if count > _MANY:
        places = itertools.chain(range(_ENDS), range(count - _ENDS, count))
    for place in places:
        yield str(place), value[place]


def _of_frame(value: Any) -> Iterator[tuple[str, Any]]:
    """Of a generator or a coroutine: where it is, and its variables."""
    frame = next(
        attribute
        for name in ("gi_frame", "ag_frame", "cr_frame")
        if (attribute := getattr(value, name, value)) is not value
    )
    yield "running", frame is not None and frame.f_lasti
    if frame is not None:
        snapshot = frame.f_locals
        variables = dict(snapshot)
        if isinstance(
            snapshot, dict
        ):  # a copy up to Python 3.12; the frame would keep it until somebody looks again
            snapshot.clear()
        yield from variables.items()


def _of_module(module: torch.nn.Module, reads: Reads) -> Iterator[tuple[str, Any]]:
    yield from module._modules.items()
    for tensors in (module._parameters, module._buffers):
        yield from tensors.items()
    yield "training", module.training
    if attributes_of(module):
        own = vars(torch.nn.Module())
        yield from ((n, v) for n, v in list(vars(module).items()) if n not in own and reads(type(module), n))


def _of_iterator(value: Any) -> Iterator[tuple[str, Any]]:
    """``iter(list)``, `zip`, `itertools.count` and the like: where they are, and what they go over."""
    if not hasattr(type(value), "__next__"):
        return
    if type(value) is itertools.count:
        yield "at", repr(value)
        return
    yield "left", operator.length_hint(value, -1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = value.__reduce__()
    except TypeError:
        return
    for number, part in enumerate(made[1:]):
        yield str(number), part


def _attributes(value: Any, reads: Reads, slots: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    yield from ((name, part) for name, part in attributes.items() if reads(kind, name))


def _slots(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for each in kind.__mro__
        for name in _names(getattr(each, "__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    )


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _of_tensor(tensor: torch.Tensor) -> Sign:
    about = (str(tensor.dtype), tuple(tensor.shape))
    if _torch.is_transformed(tensor) or tensor.device.type == "meta":
        return type(tensor).__name__
    if tensor.layout is torch.sparse_coo:
        return *about, *map(_of_tensor, (tensor._indices(), tensor._values()))
    if not plain_tensor(tensor):
        if (
            type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
            or tensor.layout is not torch.strided
        ):
            return type(tensor).__name__
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.nbytes <= _SMALL_BYTES and tensor.device.type == "cpu":
        data = plain(tensor)
        return *about, xxhash.xxh3_64_intdigest(byte_view(data).data) if data.numel() else 0
    return *about, *look(tensor)


def _of_array(value: "np.ndarray[Any, Any] | np.generic") -> Sign:
    array = np.asarray(value)
    about = (str(array.dtype), array.shape)
    if isinstance(value, np.memmap) and not array.flags.writeable:
        return about  # a data set
    flat = array.reshape(-1)
    if array.dtype.hasobject:
        return *about, bulk.digest(flat.tolist(), leaf)
    step = max(1, array.nbytes // _SMALL_BYTES) if array.nbytes > _ARRAY_BYTES else 1
    return *about, xxhash.xxh3_64_intdigest(np.ascontiguousarray(flat[::step]).view(np.uint8).data)


def _of_buffer(value: Any) -> Sign:
    return _of_array(np.frombuffer(value, dtype=np.uint8)) if memoryview(value).nbytes else 0


def _of_file(value: Any) -> Sign:
    """Where it is read; what is written, nothing depends on."""
    if value.closed or value.writable():
        return ""
    try:
        return value.tell()
    except OSError:  # "telling position disabled by next() call": it is read line by line
        return object()


def _of_state(state: Any) -> Sign:
    if isinstance(state, torch.Tensor):
        return xxhash.xxh3_64_intdigest(byte_view(plain(state)).data)
    return xxhash.xxh3_64_intdigest(repr(state).encode())
