"""What tells cheaply that a value has changed: numbers themselves, small tensors' bytes, large ones' ends and version.

A sign is made of each leaf of a value, by its path (``hidden.items.0``). Things of which nothing can be told (files,
locks, handles) have none.
"""

import itertools
import logging
import operator
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash

from swift.runtime import _torch
from swift.runtime.before import attributes_of, generator_state, look, plain_tensor
from swift.runtime.tensors import byte_view, plain

# Observers, whose state no step depends on; and what has a home of its own.
_OBSERVERS = {
    "aim", "asyncio", "comet_ml", "concurrent", "io", "_io", "logging", "mlflow", "multiprocessing", "neptune", "rich",
    "socket", "swift", "tensorboard", "tensorboardX", "threading", "_thread", "tqdm", "wandb", "weakref",
}  # fmt: skip
_TORCH_OBSERVERS = (
    "torch._C", "torch._dynamo", "torch._inductor", "torch.distributed", "torch.multiprocessing", "torch.profiler",
    "torch.autograd.profiler", "torch.utils.hooks", "torch.utils.tensorboard",
)  # fmt: skip
_INERT = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, logging.Logger,
    threading.Thread, torch.dtype, torch.device, torch.Size, range, slice,
)  # fmt: skip
_SMALL_BYTES = 16 << 10
_MANY = 256
"""Of longer containers, the ends are looked at, and which items there are (numbers by their value), up to so many:"""
_HASHED_MAX = 100_000
_ENDS = 8
_DEEP = 12
LEAVES_MAX = 20_000

Sign = Any
Signs = dict[str, Sign]
Reads = Callable[[type, str], bool]


class Look:
    """One look at several values. ``told``: ids of what needs no sign; ``reads(class, attribute)``: somebody looks at
    it."""

    def __init__(self, told: set[int], reads: Reads) -> None:
        self.signs: Signs = {}
        self._told = told
        self._reads = reads
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # what is made while looking, so that no id is used twice

    def at(self, path: str, value: Any, depth: int = 0) -> None:
        if value is None or isinstance(value, bool | int | str | bytes | float | complex):
            # (NaN is equal to itself here.)
            self.signs[path] = repr(value) if isinstance(value, float | complex) else value
            return
        if isinstance(value, _INERT) or id(value) in self._told or id(value) in self._seen:
            return
        if depth > _DEEP or len(self.signs) > LEAVES_MAX:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            self.signs[path] = _of_tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            self.signs[path] = _of_array(np.asarray(value))
        elif isinstance(value, Enum | PurePath):
            self.signs[path] = str(value)
        elif (state := generator_state(value)) is not None:
            self.signs[path] = _of_state(state[0]())
        else:
            with suppress(Exception):  # anything may come out of somebody else's `__getattr__` or `__len__`
                for name, part in parts_of(value, self._reads):
                    self.at(f"{path}.{name}", part, depth + 1)


def parts_of(value: Any, reads: Reads = lambda _kind, _name: True) -> Iterator[tuple[str, Any]]:
    """What a container, an iterator, a module or another object consists of."""
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    if isinstance(value, dict | types.MappingProxyType):
        yield from _of_mapping(value)
    elif isinstance(value, list | tuple | deque):
        yield "length", len(value)
        yield from _ends(value)
    elif isinstance(value, set | frozenset):
        yield "length", len(value)
        if len(value) <= _MANY:
            yield "items", sorted(map(repr, value))
    elif isinstance(value, torch.nn.Module):
        yield from _of_module(value, reads)
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield "running", frame is not None and frame.f_lasti
        if frame is not None:
            snapshot = frame.f_locals
            found = dict(snapshot)
            snapshot.clear()  # the frame would keep them alive until somebody looks again
            yield from found.items()
    elif root in ("itertools", "builtins"):
        yield from _of_iterator(value)
    elif root not in _OBSERVERS and not kind.__module__.startswith(_TORCH_OBSERVERS):
        yield from _attributes(value, reads)


def _of_mapping(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    yield "length", len(value)
    try:
        if len(value) <= _MANY:
            for number, (key, item) in enumerate(list(value.items())):
                yield (key if isinstance(key, str) else str(number)), item
                if not isinstance(key, str | torch.Tensor):
                    yield f"{number}.key", repr(key)
        else:
            yield "items", _hash_of(value.values())
            keys = list(itertools.islice(value, _ENDS))
            keys += list(itertools.islice(reversed(value), _ENDS)) if hasattr(value, "__reversed__") else []
            yield from ((str(key), value[key]) for key in keys)
    except RuntimeError:  # another thread changes it
        return


def _ends(value: Any) -> Iterator[tuple[str, Any]]:
    count = len(value)
    places: Iterable[int] = range(count)
    if count > _MANY:
        yield "items", _hash_of(value)
        places = itertools.chain(range(_ENDS), range(count - _ENDS, count))
    for place in places:
        yield str(place), value[place]


def _hash_of(items: Collection[Any]) -> int:
    """Numbers and strings count by their value, what else there is by which object it is."""
    if len(items) > _HASHED_MAX:
        return 0
    try:
        return hash(tuple(items))
    except TypeError:
        return hash(tuple(map(id, items)))


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


def _attributes(value: Any, reads: Reads) -> Iterator[tuple[str, Any]]:
    slots = [
        name
        for kind in type(value).__mro__
        for name in _names(getattr(kind, "__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    ]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    yield from ((name, part) for name, part in found.items() if reads(type(value), name))


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _of_tensor(tensor: torch.Tensor) -> Sign:
    if not plain_tensor(tensor) or _torch.is_transformed(tensor):
        return type(tensor).__name__
    about = (str(tensor.dtype), tuple(tensor.shape))
    if tensor.nbytes <= _SMALL_BYTES and tensor.device.type == "cpu":
        data = plain(tensor)
        return *about, xxhash.xxh3_64_intdigest(byte_view(data).data) if data.numel() else 0
    return *about, *look(tensor)


def _of_array(array: "np.ndarray[Any, Any]") -> Sign:
    if array.dtype.hasobject:
        return array.shape
    flat = array.reshape(-1)
    step = max(1, array.nbytes // _SMALL_BYTES)
    return (
        str(array.dtype),
        array.shape,
        xxhash.xxh3_64_intdigest(np.ascontiguousarray(flat[::step]).tobytes()),
    )


def _of_state(state: Any) -> Sign:
    if isinstance(state, torch.Tensor):
        return xxhash.xxh3_64_intdigest(byte_view(plain(state)).data)
    return xxhash.xxh3_64_intdigest(repr(state).encode())
