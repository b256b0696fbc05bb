"""What modules keep beside parameters and persistent buffers, as a part of a rank's state.

Buffers that are not persistent, and Python attributes. It is told by what has changed since the process began: a new
process makes the rest itself, and what is each rank's own (its number, its device) stays its own. Nothing is built
from a state but numbers, strings, tensors and containers of them: an object of the trainer's gets its attributes back,
and must be there.

    (run) ``remember`` → (checkpoints, copies, comparisons) ``state`` … ``load``
"""

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from swift.checkpoint.state import Inexpressible, join, split
from swift.errors import ServiceError, UsageError
from swift.optim.state_snapshot import OPTIMIZERS_OWN
from swift.runtime import _torch_hooks
from swift.runtime.before import (
    MODULES_OWN,
    attributes_of,
    generator_state,
    memory_of,
    object_of_ones_own,
    plain_tensor,
)
from swift.runtime.held import Held
from swift.runtime.loading import load_optimizer
from swift.runtime.made import FUNCTIONS, HOOKS, Begun, class_of, name_of, told_hooks
from swift.runtime.made import kind_of as _kind
from swift.runtime.tensors import byte_view, plain

# Of larger tensors the start's values are not kept.
_KEPT_BYTES = 64 << 20
_DEEP = 40
_OBJECT, _ENUM = "swift:object", "swift:enum"
_FROZEN, _EVALUATING = "swift:frozen", "swift:evaluating"
_FLAGS = (f".{_FROZEN}", f".{_EVALUATING}")
_STATE = "swift:state"
_VIEW = "view of a parameter"
_NAME = "name"


class _NotThere(Exception):
    """What a step has made, and only numbers, strings, arrays, tensors and containers of them can be made again."""


class _Value(NamedTuple):
    """As it was when the process began."""

    digest: str
    skeleton: Any
    tensors: dict[str, torch.Tensor] | None
    """None: too large."""


class _Place(NamedTuple):
    holder: dict[str, Any]
    name: str


class _Seen:
    """One look at all of it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """By path, with words in the place of objects."""
        self.places: dict[str, _Place] = {}
        self.holders: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, Any] = {}
        self.unknown: dict[str, Any] = {}
        """Things whose state nobody can tell."""
        self.modules: dict[str, torch.nn.Module] = {}
        self.made: dict[str, Any] = {}
        """Of modules their class, of these and of optimizers their hooks."""
        self.begun_hooks: Mapping[int, Any] | None = None
        self.enums: dict[str, type[Enum]] = {}
        self.weights: set[int] = set()
        """Where parameters lie. What lies there too has their values, and is told as a view."""
        self.views: dict[str, torch.Tensor] = {}
        self._first: dict[int, str] = {}
        self.transient: frozenset[str] = frozenset()
        self.known: frozenset[int] = frozenset()

    def module(self, path: str, module: torch.nn.Module) -> None:
        if id(module) in self._first:
            return
        self._first[id(module)] = path
        self.modules[path] = module
        self.made[path] = class_of(module)
        if _torch_hooks.has_hooks(module):
            self.hooks(path, _torch_hooks.hooks_by_kind(module))
        if attributes_of(module):
            self.dictionary(path, vars(module), MODULES_OWN)
        own = module._non_persistent_buffers_set
        lasting = frozenset(name for name in module._buffers if name not in own)
        if len(lasting) < len(module._buffers):
            self.dictionary(f"{path}.buffer", module._buffers, lasting)

    def hooks(self, path: str, hooks: Iterable[tuple[str, dict[int, Any]]]) -> None:
        if told := told_hooks(hooks, self.begun_hooks):
            self.made[f"{path}.{HOOKS}"] = told

    def dictionary(self, path: str, holder: dict[str, Any], but: frozenset[str]) -> None:
        self.holders[path] = holder
        for name in sorted(
            name
            for name in holder
            if isinstance(name, str) and name not in but and name not in self.transient
        ):
            at = f"{path}.{name}"
            self.places[at] = _Place(holder, name)
            told = self._told(holder[name], at)
            try:
                split(told)
            except UsageError:  # keys of other kinds
                self.unknown[at] = holder[name]
                told = {_OBJECT: at, "type": _kind(holder[name])}
            self.values[at] = told

    def _told(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.nn.Parameter):
            return {_OBJECT: "parameter"}  # in the module's own state
        if isinstance(value, torch.Tensor) and not plain_tensor(value):
            return self._object(value, path)  # sparse, without memory, or of a class that keeps more
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.weights:
            self.views[path] = value
            return {_OBJECT: path, "type": _VIEW}
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            return value
        if isinstance(value, Enum):
            self.enums.setdefault(_kind(value), type(value))
            return {_ENUM: value.name, "type": _kind(value)}
        kind = type(value)
        if isinstance(value, tuple) and kind not in (tuple, torch.Size):
            return self._object(value, path)  # a named tuple: its class is the trainer's
        if kind in (list, tuple, set, frozenset, deque, torch.Size):
            items = [self._told(item, f"{path}.{i}") for i, item in enumerate(value)]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            if kind in (set, frozenset):
                self.unknown[path] = value
                return {_OBJECT: path, "type": _kind(value)}
            return deque(items, value.maxlen) if kind is deque else items if kind is list else tuple(items)
        if kind in (dict, OrderedDict):
            pairs = {key: self._told(item, f"{path}.{key}") for key, item in value.items()}
            return value if all(pairs[key] is value[key] for key in value) else kind(pairs)
        try:
            split(value)
        except Inexpressible:
            return self._object(value, path)
        if _keeps_more(value) and id(value) not in self._first:
            self._first[id(value)] = path
            self.dictionary(path, vars(value), frozenset())
        return value

    def _object(self, value: Any, path: str) -> dict[str, str]:
        kind = _kind(value)
        if not object_of_ones_own(value) and (name := name_of(value)):
            self.objects[path] = value
            if not isinstance(value, FUNCTIONS):
                self.unknown[path] = value  # (a partial) what it holds may change
            return {_OBJECT: path, "type": kind, _NAME: name}
        first = self._first.get(id(value))
        if first is not None:
            return {_OBJECT: first, "type": kind}
        self._first[id(value)] = path
        self.objects[path] = value
        if path.count(".") > _DEEP or id(value) in self.known:
            return {_OBJECT: path, "type": kind}
        if isinstance(value, torch.nn.Module):
            del self._first[id(value)]
            for name, part in value.named_modules(prefix=path):
                self.module(name, part)
                weights = {k: p.detach() for k, p in part._parameters.items() if p is not None}
                if weights:
                    self.dictionary(f"{name}.hidden", weights, frozenset())
        elif (state := generator_state(value)) is not None:
            self.values[f"{path}.{_STATE}"] = state[0]()
            self.places[f"{path}.{_STATE}"] = _Place({"set": state[1]}, _STATE)
        elif _tells_state(value):
            self.values[f"{path}.{_STATE}"] = value.state_dict()
            inner = isinstance(value, torch.optim.Optimizer)
            put = partial(load_optimizer, value) if inner else value.load_state_dict
            self.places[f"{path}.{_STATE}"] = _Place({"set": put}, _STATE)
        elif object_of_ones_own(value):
            self.dictionary(path, vars(value), frozenset())
        else:
            self.unknown[path] = value
        return {_OBJECT: path, "type": kind}


class Beside:
    """Of all stages and whole modules of one rank, by their keys."""

    def __init__(self) -> None:
        self._modules: dict[str, torch.nn.Module] = {}
        self._begin: dict[str, _Value] = {}
        self._unknown: dict[str, Any] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._functions: dict[str, Any] = {}
        self._begun = Begun({}, {})
        self.held = Held()
        """What registered objects hold."""
        self._buffers: dict[str, set[str]] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._known: frozenset[int] = frozenset()
        self.transient: set[str] = set()
        """Names of attributes that need not outlive a failure."""
        self.lost: list[str] = []
        """Paths in the state that was loaded last of what a step had made, and a process cannot make again."""

    def remember(
        self,
        modules: Mapping[str, torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """(before the first step, and before any state is loaded) What a new process begins with.

        `objects`: what is registered, and in the rank's state already.
        """
        self._modules, self._optimizers = dict(modules), list(optimizers)
        self._known = frozenset(map(id, (*objects.values(), *optimizers)))
        self.held.remember(objects)
        self._begun = Begun({}, {})
        seen = self._look(beginning=True)
        self._begun = Begun(seen.made, seen.modules, optimizers)
        self._functions = {path: value for path, value in seen.objects.items() if name_of(value)}
        self._begin = {path: _value(value, copied=True) for path, value in seen.values.items()}
        self._unknown, self._views = dict(seen.unknown), dict(seen.views)
        self._buffers = {key: _buffer_names(module) for key, module in modules.items()}

    @property
    def remembered(self) -> bool:
        return bool(self._modules)

    def names_at_begin(self, key: str) -> set[str]:
        """Of the buffers that a module's class has made."""
        return self._buffers.get(key, set())

    def _look(self, *, beginning: bool = False) -> _Seen:
        seen = _Seen()
        seen.begun_hooks = None if beginning else self._begun.hooks
        seen.transient, seen.known = frozenset(self.transient), self._known
        seen.weights = memory_of(p for module in self._modules.values() for p in module.parameters())
        for key, module in self._modules.items():
            for name, part in module.named_modules(prefix=key):
                seen.module(name, part)
            seen.values[f"{key}.{_FROZEN}"] = [n for n, p in module.named_parameters() if not p.requires_grad]
            seen.values[f"{key}.{_EVALUATING}"] = [
                n for n, part in module.named_modules() if not part.training
            ]
        for number, optimizer in enumerate(self._optimizers):
            seen.dictionary(f"optimizer{number}", vars(optimizer), OPTIMIZERS_OWN)
            seen.hooks(f"optimizer{number}", _torch_hooks.optimizer_hooks(optimizer))
        return seen

    def state(self) -> dict[str, Any]:
        """``values`` by path, ``gone`` paths, ``made``: classes and hooks that are others, by name, and ``unknown``:
        what has changed and cannot be told."""
        if not self._modules:
            return {"values": {}, "gone": [], "unknown": [], "made": {}, "held": {}}
        seen = self._look()
        values = {
            path: value
            for path, value in seen.values.items()
            if path not in self._begin or _digest(value) != self._begin[path].digest
        }
        gone = [path for path in self._begin if path not in seen.values]
        unknown = [
            path
            for path, value in seen.unknown.items()
            if self._unknown.get(path, self) is not value and not name_of(value)
        ]
        made = self._begun.changes(seen.made)
        held = self.held.state()
        return {"values": values, "gone": gone, "unknown": unknown, "made": made, "held": held}

    def untellable(self) -> dict[str, Any]:
        """By path: what keeps its state to itself (iterators, objects with slots). That it changes can be seen.

        Those with which a process begins: `state` names the others.
        """
        return {path: v for path, v in self._look().unknown.items() if self._unknown.get(path, self) is v}

    def load(self, state: Mapping[str, Any]) -> None:
        """(behind ``held.prepare``, and registered objects) Raises ServiceError for what cannot be put where it was."""
        seen, apart = self._made_alike(state.get("made"))
        self.lost = [path for path in apart if path.rpartition(".")[2] not in self.transient]
        below = tuple(f"{path}." for path in apart if not path.endswith(f".{HOOKS}"))
        values = dict(state["values"])
        for path, begun in self._begin.items():
            if path in values or path in state["gone"]:
                continue
            if path not in seen.values or _digest(seen.values[path]) != begun.digest:
                if begun.tensors is None:
                    raise ServiceError(
                        f"{path} of a module has changed, and is too large to be kept as it was"
                    )
                copies = {name: tensor.clone() for name, tensor in begun.tensors.items()}
                values[path] = join(begun.skeleton, copies)
        for path in [*(p for p in seen.values if p not in self._begin and p not in values), *state["gone"]]:
            if (place := seen.places.get(path)) is not None and not path.startswith(below):
                place.holder.pop(place.name, None)
        for path in sorted(values, key=lambda path: path.count(".")):  # what holds others first
            if path.startswith((*below, *(f"{lost}." for lost in self.lost))) and not path.endswith(_FLAGS):
                continue
            try:
                self._put(seen, path, values[path])
            except _NotThere:
                self.lost.append(path)
        held = self.held.load(state.get("held", {}), replica="apart" in state)
        self.lost += [path for path in held if self.transient.isdisjoint(path.split("."))]

    def _made_alike(self, changes: Mapping[str, Any] | None) -> tuple[_Seen, list[str]]:
        """What there is, once what can be put back is, and the paths of modules and hooks that are others here. What is
        below a module that is another is not told of. None: the state is older than that anybody told."""
        seen = self._look()
        if changes is None:
            return seen, []
        for _ in range(2):  # first submodules, then what hangs on those that are there again
            if not self._begun.put_back(seen.modules, seen.made, changes):
                break
            seen = self._look()
        apart: list[str] = []
        for path in self._begun.apart(seen.made, changes):
            if not path.startswith(tuple(f"{other}." for other in apart)):
                apart.append(path)
        return seen, apart

    def _put(self, seen: _Seen, path: str, value: Any) -> None:
        key, _, flag = path.rpartition(".")
        if flag == _FROZEN:
            for name, parameter in self._modules[key].named_parameters():
                parameter.requires_grad_(name not in value)
            return
        if flag == _EVALUATING:
            for name, part in self._modules[key].named_modules():
                part.training = name not in value
            return
        if path.endswith(f".{_STATE}"):
            if (place := seen.places.get(path)) is None:
                raise _NotThere
            place.holder["set"](value)
            return
        holder_path, _, name = path.rpartition(".")
        holder = seen.places[path].holder if path in seen.places else seen.holders.get(holder_path)
        module = seen.modules.get(holder_path.removesuffix(".buffer"))
        if holder is None and module is not None and holder_path.endswith(".buffer"):
            holder = module._buffers
            module._non_persistent_buffers_set.add(name)
        if holder is None:
            raise _NotThere
        revived = self._revived(seen, value, path)
        if revived is seen.views.get(path, self._views.get(path, self)):
            holder[name] = revived
        elif path in seen.views:  # what is there is not its own: nothing is copied into a parameter
            holder[name] = revived.detach().clone() if isinstance(revived, torch.Tensor) else revived
        else:
            _assign(holder, name, revived)

    def _revived(self, seen: _Seen, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in (dict, OrderedDict):
            if _OBJECT in value:
                return self._there(seen, value, path)
            if _ENUM in value:
                if value["type"] not in seen.enums:
                    raise _NotThere
                return seen.enums[value["type"]][value[_ENUM]]
            return kind((key, self._revived(seen, item, path)) for key, item in value.items())
        if kind in (list, tuple):
            return kind(self._revived(seen, item, path) for item in value)
        if kind is deque:
            return deque((self._revived(seen, item, path) for item in value), value.maxlen)
        return value

    def _there(self, seen: _Seen, words: dict[str, str], path: str) -> Any:
        if words.get("type") == _VIEW:
            return self._view(seen, path)
        if _NAME in words:
            return self._function(seen, words[_OBJECT], words[_NAME])
        thing = seen.objects.get(words[_OBJECT])
        if thing is None or _kind(thing) != words.get("type"):
            raise _NotThere
        return thing

    def _function(self, seen: _Seen, path: str, name: str) -> Any:
        """Of this name: what is there now, or was when the process began. One that has taken something along is only
        looked for in its own place: others of its name may have taken other things."""
        for functions in (seen.objects, self._functions):
            if path in functions and name_of(functions[path]) == name:
                return functions[path]
        if not name.startswith("partial") and "<" not in name:
            for function in (*seen.objects.values(), *self._functions.values()):
                if name_of(function) == name:
                    return function
        raise _NotThere

    def _view(self, seen: _Seen, path: str) -> torch.Tensor:
        """Of this process: now, or when it began (spectral_norm's weight, which its first forward replaces)."""
        view = seen.views.get(path, self._views.get(path))
        if view is None or view.untyped_storage().data_ptr() not in seen.weights:
            raise _NotThere
        return view


def _keeps_more(value: Any) -> bool:
    """A container of a class of the trainer's own, with attributes that are not its items once more."""
    own = getattr(value, "__dict__", {}) if isinstance(value, list | dict | set | deque) else {}
    items = value if isinstance(value, dict) else {}
    return any(items.get(name) is not attribute for name, attribute in own.items())


def _tells_state(value: Any) -> bool:
    """An optimizer in an optimizer, an average: taken back as a registered object is."""
    if isinstance(value, type) or not all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        return False
    try:
        split(value.state_dict())
    except Exception:  # noqa: BLE001  (the trainer's own code; its attributes are looked at then)
        return False
    return True


def _buffer_names(module: torch.nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in part._buffers
    }


def _assign(holder: dict[str, Any], name: str, value: Any) -> None:
    """Into what is there, if it is of one kind: others may hold it, too."""
    old = holder.get(name)
    if isinstance(value, torch.Tensor):
        if isinstance(old, torch.Tensor) and (old.dtype, old.shape, old.stride()) == (
            value.dtype,
            value.shape,
            value.stride(),
        ):
            with torch.no_grad():
                old.detach().copy_(value)
        else:
            holder[name] = value.detach().clone()
    elif isinstance(value, list | dict | set | deque) and isinstance(old, type(value)) and old is not value:
        _fill(old, value)
    elif type(value) is np.ndarray and type(old) is np.ndarray and _alike(value, old):
        old[...] = value
    else:
        holder[name] = value


def _fill(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(items, dict | set):
        container.update(items)
    else:
        container.extend(items)


def _alike(one: "np.ndarray[Any, Any]", other: "np.ndarray[Any, Any]") -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and other.flags.writeable


def _value(value: Any, *, copied: bool) -> _Value:
    tensors, skeleton = split(value)
    digest = _digest_of(tensors, skeleton)
    if sum(tensor.nbytes for tensor in tensors.values()) > _KEPT_BYTES:
        return _Value(digest, skeleton, None)
    copies = {
        name: tensor.detach().clone(memory_format=torch.preserve_format) for name, tensor in tensors.items()
    }
    return _Value(digest, json.loads(json.dumps(skeleton)), copies)


def _digest(value: Any) -> str:
    return _digest_of(*split(value))


def _digest_of(tensors: dict[str, torch.Tensor], skeleton: Any) -> str:
    sha = hashlib.blake2b(json.dumps(skeleton).encode(), digest_size=16)
    for name in sorted(tensors):
        data = plain(tensors[name])
        sha.update(byte_view(data).data if data.numel() else b"")
    return sha.hexdigest()
