"""Modules as they were: what a forward did to them can be taken back.

Buffers, Python attributes (numbers, containers, arrays, tensors, objects of the trainer's own classes) and parameters
that no optimizer updates. A forward may change a value in place, bind another one to its name
(``self.mean = 0.9 * self.mean + …``), or make one (a cache). So it is the names that are kept, what was bound to
them, and the values of what can be changed in place.

It is done before every step, so it looks at what is there, and copies what is small or has changed since.
"""

import ctypes
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from swift.runtime import _torch_hooks, made
from swift.runtime.tensors import same_bits

# What every module has, or a lazy one, and torch keeps. (Training and evaluation mode is the session's to put back.)
MODULES_OWN = frozenset((*vars(torch.nn.Module()), "_initialize_hook", "_load_hook"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.generic)
_INERT = (
    *_PLAIN,
    Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    torch.nn.Parameter,
)
# Objects of these packages are not taken apart.
_OTHERS = (
    "torch",
    "swift",
    "numpy",
    "logging",
    "threading",
    "multiprocessing",
    "concurrent",
    "typing",
    "weakref",
    "functools",
    "importlib",
    "asyncio",
    "types",
    "abc",
    "builtins",
    "_thread",
    "_io",
)
# Modules of these keep what a step needs in other places.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "torch.fx", "torch.export")
_CONTAINERS = (list, OrderedDict, dict, set, deque, bytearray)
_LARGE_BYTES = 64 << 10
_ENDS_BYTES = 64
_NOTHING: made.Hung = {}


def attributes_of(module: torch.nn.Module) -> bool:
    """Its attributes are its class's, and not a wrapper's of torch's."""
    kind = type(module)
    if issubclass(kind, FSDPModule) and kind.__module__.startswith("torch.distributed"):
        kind = kind.__mro__[2]  # FSDP2 puts a class of its own in front of the trainer's
    return not (kind.__module__.startswith(_WRAPPERS) or issubclass(kind, torch.fx.GraphModule))


def own_attributes(value: Any) -> dict[str, Any] | None:
    """Its ``__dict__``, if it has one; a ``__getattr__`` of its class is not asked."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def object_of_ones_own(value: Any) -> bool:
    """It has attributes, and a class that a trainer's code may change objects of."""
    kind = type(value)
    return (
        own_attributes(value) is not None
        and not isinstance(value, type | torch.nn.Module | Enum)
        and not callable(getattr(kind, "__get__", None))
        and (
            kind.__module__.partition(".")[0] not in _OTHERS
            or (kind.__module__ == "types" and kind.__name__ == "SimpleNamespace")
        )
    )


def generator_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """(get, set) of the state of a random generator; None: it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else (value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return (lambda: value.get_state(legacy=False)), value.set_state
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    return None


class Looks:
    """(before every step) ``keep(parameters)`` … ``changed(parameter)``: as `look`, with less work."""

    def __init__(self) -> None:
        self._known: dict[torch.nn.Parameter, tuple[int, int]] = {}
        """Address and readable bytes."""
        self._were: dict[torch.nn.Parameter, tuple[Any, ...]] = {}

    def keep(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._were = {parameter: self._look(parameter) for parameter in parameters}

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        return iter(self._were)

    def changed(self, parameter: torch.nn.Parameter) -> bool:
        return self._look(parameter) != self._were[parameter]

    def _look(self, parameter: torch.nn.Parameter) -> tuple[Any, ...]:
        address = parameter.data_ptr()
        known = self._known.get(parameter)
        if known is None or known[0] != address:
            readable = plain_tensor(parameter) and parameter.device.type == "cpu"
            known = address, min(parameter.nbytes, _ENDS_BYTES) if readable else 0
            self._known[parameter] = known
        size = known[1]
        return address, parameter._version, ctypes.string_at(address, size) if size else b""


def look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells cheaply that a tensor was changed: its memory, its version, and its first and last bytes.

    Kernels and `.data` do not count versions; whoever changes a whole tensor so changes its ends.
    """
    address, size = tensor.data_ptr(), tensor.nbytes
    if not size or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return address, _version(tensor)
    ends = min(size, _ENDS_BYTES)
    return (
        address,
        _version(tensor),
        ctypes.string_at(address, ends),
        ctypes.string_at(address + size - ends, ends),
    )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def plain_tensor(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
    )


def memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Where these lie: a tensor that lies there too is a view of one of them."""
    return {t.untyped_storage().data_ptr() for t in tensors if plain_tensor(t)} - {0}


def _inert(value: Any) -> bool:
    """Nothing in it can change."""
    if isinstance(value, tuple):
        return all(map(_inert, value))
    return isinstance(value, _INERT)


class _Holder:
    """A dictionary of names."""

    __slots__ = ("but", "holder", "mutable", "seen")

    def __init__(self, holder: dict[str, Any], but: frozenset[str]):
        self.holder, self.but = holder, but
        self.seen: dict[str, Any] = {}
        self.mutable: list[Any] = []
        self.look()

    def look(self) -> None:
        holder, seen = self.holder, self.seen
        if (
            len(holder) == len(seen)
            and all(map(is_, holder.values(), seen.values()))
            and list(holder) == list(seen)
        ):
            return
        self.seen = holder.copy()
        self.mutable = [v for k, v in holder.items() if k not in self.but and not _inert(v)]

    def put_back(self) -> None:
        holder, seen, but = self.holder, self.seen, self.but
        for key in [key for key in holder if key not in seen and key not in but]:
            del holder[key]
        for key, value in seen.items():
            if key not in but and holder.get(key, self) is not value:
                holder[key] = value

    @property
    def changed(self) -> bool:
        names = [key for key in (*self.holder, *self.seen) if key not in self.but]
        return any(self.holder.get(key, self) is not self.seen.get(key, self) for key in names)


class _Copy:
    """A tensor or an array, and what it was."""

    __slots__ = ("looked", "value", "was")

    def __init__(self, value: Any):
        self.value = value
        self.was: Any
        self.looked: tuple[Any, ...] = ()
        if isinstance(value, np.ndarray):
            self.was = value.copy()
        else:
            self.was, self.looked = value.detach().clone(), look(value)

    @property
    def stands(self) -> bool:
        """(large ones) It need not be copied again."""
        large = isinstance(self.value, torch.Tensor) and self.value.nbytes >= _LARGE_BYTES
        return large and look(self.value) == self.looked

    @property
    def changed(self) -> bool:
        if isinstance(self.value, np.ndarray):
            return bool(self.value.tobytes() != self.was.tobytes())
        return (
            self.value.shape != self.was.shape
            or self.value.dtype != self.was.dtype
            or not same_bits(self.value, self.was)
        )

    def put_back(self) -> None:
        if isinstance(self.value, np.ndarray):
            if self.value.flags.writeable:
                self.value[...] = self.was
            return
        with torch.no_grad():
            if self.value.shape == self.was.shape and self.value.dtype == self.was.dtype:
                if self.changed:
                    self.value.detach().copy_(self.was)
            else:
                self.value.data = self.was.clone()


class _Contents:
    """A container, and what was in it. One of a trainer's own class is taken as what it derives from: its methods may
    do other things."""

    __slots__ = ("inert", "kind", "value", "was")

    def __init__(self, value: Any):
        self.kind: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        self.value: Any = value
        self.was: Any = self.kind(value)
        self.inert = all(map(_inert, value.values() if isinstance(value, dict) else value))

    @property
    def changed(self) -> bool:
        if len(self.value) != len(self.was):
            return True
        if isinstance(self.value, set):
            return bool(self.value != self.was)
        if isinstance(self.value, dict):
            return list(self.value) != list(self.was) or not all(
                map(is_, self.value.values(), self.was.values())
            )
        return not all(map(is_, self.value, self.was))

    def put_back(self) -> None:
        if not self.changed:
            return
        self.kind.clear(self.value)
        if isinstance(self.value, dict | set):
            self.kind.update(self.value, self.was)
        else:
            self.kind.extend(self.value, self.was)


class _State:
    """A random generator, and where it was."""

    __slots__ = ("get", "set", "was")

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]):
        self.get, self.set, self.was = get, put, get()

    @property
    def changed(self) -> bool:
        return repr(self.get()) != repr(self.was)

    def put_back(self) -> None:
        self.set(self.was)


class Before:
    """``keep()`` … ``changed``, ``put_back()``; ``keep()`` again."""

    def __init__(self, modules: Iterable[torch.nn.Module], *, parameters: bool = False):
        """`parameters`: their values as well."""
        self.roots = list(modules)
        self._parameters = parameters
        self._flags: list[tuple[torch.nn.Parameter, bool]] = []
        self._holders: dict[int, _Holder] = {}
        self._copies: dict[int, _Copy] = {}
        self._contents: dict[int, _Contents] = {}
        self._kept: list[_Holder | _Copy | _Contents | _State] = []
        self._slots: list[tuple[torch.nn.Module, dict[str, torch.nn.Module | None]]] = []
        """Submodules, which a step may replace by others without parameters."""
        self._hung: list[tuple[torch.nn.Module, made.Hung]] = []
        """Hooks of each module."""
        self._visited: set[int] = set()
        self._weights: set[int] | None = None

    def keep(self, besides: Iterable[torch.Tensor] = ()) -> None:
        """`besides`: tensors whose values are kept, too."""
        self._kept, self._visited, self._weights = [], set(), None
        copies, self._copies = self._copies, {}
        holders, self._holders = self._holders, {}
        contents, self._contents = self._contents, {}
        self._old = copies, holders, contents
        self._flags, self._slots, self._hung = [], [], []
        for module in self._modules():
            self._module(module)
        for tensor in besides:
            self._value(tensor, parameter=True)
        self._old = {}, {}, {}

    def lend(self) -> None:
        """Behind `keep`: buffers are copies until `put_back`. What a forward does to them does not touch those that
        graphs of other forwards have saved: autograd refuses a backward whose tensors were changed in place.

        Buffers that share memory share it as copies. Those that autograd follows stay as they are."""
        memories: dict[int, torch.Tensor] = {}
        for module in self._modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and plain_tensor(buffer) and not buffer.requires_grad:
                    module._buffers[name] = _copy_of(buffer, memories)

    def forget(self) -> None:
        """The step is done."""
        self._kept, self._slots, self._hung = [], [], []

    @property
    def changed(self) -> bool:
        return (
            any(kept.changed for kept in self._kept)
            or any(list(module._modules.items()) != list(was.items()) for module, was in self._slots)
            or any(made.rehung(*each) for each in self._hung)
        )

    def put_back(self) -> None:
        """All is as it was at `keep`, submodules and hooks too: the step is done again, and would hang a second one."""
        for kept in self._kept:
            kept.put_back()
        for module, slots in self._slots:
            made.fill_slots(module, slots, {*slots, *module._modules})
        for module, hung in self._hung:
            made.hang_again(module, hung)
        for parameter, trained in self._flags:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        self._kept, self._flags, self._slots, self._hung = [], [], [], []

    def _modules(self) -> Iterator[torch.nn.Module]:
        # Every step, so not by torch's `modules()`, which makes names.
        left, seen = list(self.roots), set()
        while left:
            module = left.pop()
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                left.extend(module._modules.values())  # type: ignore[arg-type]
                yield module

    def _module(self, module: torch.nn.Module) -> None:
        if id(module) in self._visited:
            return
        self._visited.add(id(module))
        if attributes_of(module):
            self._dictionary(vars(module), MODULES_OWN)
        if module._buffers:
            self._dictionary(module._buffers, frozenset())
        if module._modules:
            self._slots.append((module, module._modules.copy()))
        hung: Any = _torch_hooks.own_hooks(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                hung = hung or parameter._backward_hooks or parameter._post_accumulate_grad_hooks
                self._flags.append((parameter, parameter.requires_grad))
                if self._parameters:
                    self._value(parameter, parameter=True)
        self._hung.append((module, made.hung_on(module) if hung else _NOTHING))

    def _dictionary(self, holder: dict[str, Any], but: frozenset[str]) -> None:
        kept_holder = self._old[1].get(id(holder))
        if kept_holder is None or kept_holder.holder is not holder:
            kept_holder = _Holder(holder, but)
        else:
            kept_holder.look()
        self._holders[id(holder)] = kept_holder
        self._kept.append(kept_holder)
        for value in kept_holder.mutable:
            self._value(value)

    def _value(self, value: Any, *, parameter: bool = False) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._visited:
            return
        if isinstance(value, torch.Tensor):
            if plain_tensor(value) and (
                parameter or not (isinstance(value, torch.nn.Parameter) or self._views_weights(value))
            ):
                self._visited.add(id(value))
                self._copy(value)
        elif isinstance(value, tuple | frozenset):
            for item in value:
                self._value(item)
        elif isinstance(value, torch.nn.Module):
            self._hidden(value)
        elif type(value) is np.ndarray:
            self._visited.add(id(value))
            if not value.dtype.hasobject:
                self._copy(value)
        else:
            self._visited.add(id(value))
            self._thing(value)

    def _views_weights(self, value: torch.Tensor) -> bool:
        """What it holds is a parameter's, which is put back by other means."""
        if self._weights is None:
            self._weights = memory_of(
                p for m in self._modules() for p in m._parameters.values() if p is not None
            )
        return value.untyped_storage().data_ptr() in self._weights

    def _hidden(self, module: torch.nn.Module) -> None:
        """One that hangs below no other: who keeps it in a list wants its parameters out of `parameters()`."""
        for part in module.modules():
            if id(part) not in self._visited:
                self._module(part)
                for parameter in part._parameters.values():
                    if parameter is not None and not parameter.requires_grad:
                        self._value(parameter, parameter=True)

    def _thing(self, value: Any) -> None:
        if isinstance(value, _CONTAINERS):
            kept_contents = self._old[2].get(id(value))
            if kept_contents is None or kept_contents.value is not value or kept_contents.changed:
                kept_contents = _Contents(value)
            self._contents[id(value)] = kept_contents
            self._kept.append(kept_contents)
            if not kept_contents.inert:  # (a vocabulary is looked through once)
                items: Iterable[Any] = value.values() if isinstance(value, dict) else value
                for item in items:
                    self._value(item)
            if getattr(value, "__dict__", None):
                self._dictionary(vars(value), frozenset())
        elif (state := generator_state(value)) is not None:
            self._kept.append(_State(*state))
        elif object_of_ones_own(value):
            self._dictionary(vars(value), frozenset())

    def _copy(self, value: Any) -> None:
        kept_copy = self._old[0].get(id(value))
        if kept_copy is None or kept_copy.value is not value or not kept_copy.stands:
            kept_copy = _Copy(value)
        self._copies[id(value)] = kept_copy
        self._kept.append(kept_copy)


def _copy_of(buffer: torch.Tensor, memories: dict[int, torch.Tensor]) -> torch.Tensor:
    """The same view of a copy of its memory. `memories`: those copied so far, by their address."""
    memory = buffer.untyped_storage()
    address = memory.data_ptr()
    if address not in memories:
        whole = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        memories[address] = whole.set_(memory).clone()
    copy = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    return copy.set_(
        memories[address].untyped_storage(), buffer.storage_offset(), buffer.shape, buffer.stride()
    )
