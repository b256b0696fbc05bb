"""Loads states into modules and optimizers as they were saved: dtypes, bits and strides.

torch's own loading serves other purposes. An optimizer casts its state to the dtype of the parameter. A module copies
into its existing tensors, regardless of strides. Both are still called (hooks, subclasses that load in their own way);
what they have changed is corrected or refused.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from swift_ft import torch_private
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.state.digests import digest_of, digests_of
from swift_ft.state.tensors import differ
from swift_ft.state.transfer import local
from swift_ft.state.tree import join, split

# State of modules besides parameters and persistent buffers, for checkpoints and for dropping a step.
#
# In torch's terms: buffers that are not persistent, and plain attributes of modules (numbers, strings, tensors, arrays,
# small containers of them); which parameters are frozen, and which modules train. Objects, hooks and closures are not
# covered: the trainer registers them, and a rehearsal finds those that matter (docs/exactness.md).
#
# A value is restored into the existing tensor, array or container if that is of the same kind: other objects may
# refer to it too, or to a view of it.
#
#     ``ModuleState``   (run) ``remember`` → (checkpoints, copies, comparisons) ``state`` … ``load``
#     ``KeptModules``   (step) ``keep`` → … ``restore``, or ``forget``

# Attributes of every module, or of a lazy one, that torch manages. (The session restores training/evaluation mode.)
_MODULES_OWN = frozenset((*vars(torch.nn.Module()), "_initialize_hook", "_load_hook"))
_NUMBERS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.generic)
_LISTED = (list, tuple, set, frozenset, deque, torch.Size)
_NAMED = (dict, OrderedDict)
_ITEMS_MAX = 4096
"""Limit on a container's items; a larger one is not treated as plain."""
# Modules of these packages keep the state that a step needs elsewhere.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "torch.fx", "torch.export")
_LARGE_BYTES = 64 << 10
_STEPS_LOOKED_AT = 3
"""Steps for which a large tensor is compared with its copy. From then on its version counter decides."""
_KEPT_BYTES = 64 << 20
"""Limit on the bytes of a start value that is kept, to restore it later."""


def plain_tensor(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
    )


def memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns the addresses of the tensors' storages. A tensor with one of them is a view of one of these tensors."""
    return {t.untyped_storage().data_ptr() for t in tensors if plain_tensor(t)} - {0}


def has_attributes(module: torch.nn.Module) -> bool:
    """Returns whether the module's attributes are those of the trainer's class, not of one of torch's wrappers."""
    kind = type(module)
    if issubclass(kind, FSDPModule) and kind.__module__.startswith("torch.distributed"):
        kind = kind.__mro__[2]  # FSDP2 inserts a class of its own before the trainer's
    return not (kind.__module__.startswith(_WRAPPERS) or issubclass(kind, torch.fx.GraphModule)) and not (
        torch_private.is_compiled(module)
    )


def is_plain(value: Any) -> bool:
    """Returns whether the value consists of numbers, strings, tensors, arrays and small containers of them."""
    left, count = [value], 0
    while left:
        item = left.pop()
        count += 1
        kind = type(item)
        if count > _ITEMS_MAX:
            return False
        if kind in _LISTED:
            left.extend(item)
        elif kind in _NAMED:
            left.extend(item.values())
            left.extend(item)
        elif kind is np.ndarray:
            if item.dtype.hasobject:
                return False
        elif isinstance(item, torch.Tensor):
            if isinstance(item, torch.nn.Parameter) or not plain_tensor(item):
                return False
        elif not isinstance(item, _NUMBERS):
            return False
    return True


def put_into(old: Any, value: Any) -> Any:
    """Copies `value` into `old` if that is of the same kind. Returns the result, which is `old` or a new object."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value.detach().clone()
        alike = isinstance(old, torch.Tensor) and (old.dtype, old.shape) == (value.dtype, value.shape)
        # Kernels depend on strides, so these must match; but a view stays a view.
        if not (alike and old.layout is torch.strided and (old._is_view() or old.stride() == value.stride())):
            return value.detach().clone(memory_format=torch.preserve_format)
        with torch.no_grad():
            old.detach().copy_(value)
        return old
    if kind is np.ndarray:
        if type(old) is kind and (old.dtype, old.shape) == (value.dtype, value.shape) and old.flags.writeable:
            old[...] = value
            return old
        return value.copy()
    if kind in _NAMED:
        made = {
            key: put_into(old.get(key) if type(old) is kind else None, item) for key, item in value.items()
        }
        return _filled(old, made) if type(old) is kind else kind(made)
    if kind in _LISTED and kind is not torch.Size:
        olds = list(old) if type(old) is kind and kind not in (set, frozenset) else []
        olds += [None] * (len(value) - len(olds))
        items = [put_into(each, item) for each, item in zip(olds, value, strict=False)]
        if type(old) is kind and kind in (list, set, deque):
            return _filled(old, items)
        return deque(items, value.maxlen) if kind is deque else kind(items)
    return value


def _filled(container: Any, items: Any) -> Any:
    container.clear()
    if isinstance(container, dict | set):
        container.update(items)
    else:
        container.extend(items)
    return container


class _Place(NamedTuple):
    holder: dict[str, Any]
    name: str


class _Value(NamedTuple):
    digest: bytes
    skeleton: Any
    tensors: dict[str, torch.Tensor] | None
    """None: too large to be kept."""


class ModuleState:
    """State of all stages and whole modules of one rank, by their keys.

    It consists of the changes since the process began. A new process creates the rest itself, and values of a single
    rank (its number, its device) are not overwritten.
    """

    def __init__(self) -> None:
        self._modules: dict[str, torch.nn.Module] = {}
        self._begin: dict[str, _Value] = {}
        self._buffers: dict[str, set[str]] = {}
        self.between_steps: Mapping[str, bytes] | None = None
        """Digests of all values for the next `state`, if they are known: no step may have begun since."""

    def remember(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """(before the first step, and before any state is loaded) Records the values with which a process begins."""
        self._modules = dict(modules)
        begin = self.values()
        self._begin = {
            path: _Value(digest, *_kept(value))
            for (path, value), digest in zip(begin.items(), digests_of([*begin.values()]), strict=True)
        }
        self._buffers = {
            key: {name for name, _ in module.named_buffers(remove_duplicate=False)}
            for key, module in modules.items()
        }

    @property
    def remembered(self) -> bool:
        return bool(self._modules)

    def names_at_begin(self, key: str) -> set[str]:
        """Returns the names of the buffers that the module's constructor created."""
        return self._buffers.get(key, set())

    def _places(self) -> dict[str, _Place]:
        weights = memory_of(p for module in self._modules.values() for p in module.parameters())
        return {
            f"{key}.{name}": place
            for key, module in self._modules.items()
            for name, place in _places_of(module, weights)
        }

    def values(self) -> dict[str, Any]:
        """Returns all captured values by path, changed or not."""
        return {path: place.holder[place.name] for path, place in self._places().items()}

    def changed(self, digests: Mapping[str, bytes]) -> set[str]:
        """Returns the paths whose values are not those of the begin. `digests`: of all values."""
        return {
            path
            for path, digest in digests.items()
            if path not in self._begin or digest != self._begin[path].digest
        }

    def state(self) -> dict[str, Any]:
        """Returns ``values`` by path, ``gone`` paths, and by key the names of ``frozen`` parameters and of
        ``evaluating`` modules."""
        values = self.values()
        known, self.between_steps = self.between_steps, None
        if known is None:
            known = dict(zip(values, digests_of([*values.values()]), strict=True))
        changed = self.changed(known)
        return {
            "values": {path: value for path, value in values.items() if path in changed},
            "gone": [path for path in self._begin if path not in values],
            "frozen": {
                key: [name for name, p in module.named_parameters() if not p.requires_grad]
                for key, module in self._modules.items()
            },
            "evaluating": {
                key: [name for name, part in module.named_modules() if not part.training]
                for key, module in self._modules.items()
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads a `state`. Raises ServiceError if a value has changed whose start value was too large to be kept."""
        for key, module in self._modules.items():
            frozen, evaluating = set(state["frozen"][key]), set(state["evaluating"][key])
            for name, parameter in module.named_parameters():
                if parameter.requires_grad != (name not in frozen):
                    parameter.requires_grad_(name not in frozen)
            for name, part in module.named_modules():
                part.training = name not in evaluating
        places, values = self._places(), state["values"]
        for path, place in list(places.items()):
            if path in state["gone"] or (path not in self._begin and path not in values):
                del place.holder[place.name], places[path]
        as_begun = [path for path in self._begin if path not in values and path not in state["gone"]]
        for goes_into in (
            True,
            False,
        ):  # second pass: values that shared an object at the start and differ in the state
            for path in (*values, *as_begun):
                at = places.get(path) or self._made_place(path)
                if at is None:
                    continue
                there = at.holder.get(at.name, self)
                if there is not self and (
                    digest_of(there) == self._begin[path].digest
                    if path not in values
                    else not goes_into and _same(there, values[path])
                ):
                    continue
                value = values[path] if path in values else _again(self._begin[path], path)
                # An existing value may be a view of a parameter: then it is no place of its own.
                at.holder[at.name] = put_into(there if goes_into and path in places else None, value)
                places[path] = at

    def _made_place(self, path: str) -> _Place | None:
        """Returns the place of an attribute that does not exist now; None if its module does not exist either."""
        key, _, rest = path.partition(".")
        below, _, name = rest.rpartition(".")
        buffer = below == "buffer" or below.endswith(".buffer")
        below = below.removesuffix("buffer").removesuffix(".") if buffer else below
        try:
            module = self._modules[key].get_submodule(below)
        except (AttributeError, KeyError):
            return None
        if buffer:
            module._non_persistent_buffers_set.add(name)
        return _Place(module._buffers if buffer else vars(module), name)


def _places_of(module: torch.nn.Module, weights: set[int]) -> Iterator[tuple[str, _Place]]:
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        for buffer in sorted(part._non_persistent_buffers_set & part._buffers.keys()):
            value = part._buffers[buffer]
            if value is None or plain_tensor(value):
                yield f"{prefix}buffer.{buffer}", _Place(part._buffers, buffer)
        if not has_attributes(part):
            continue
        for attribute in sorted(name for name in vars(part) if name not in _MODULES_OWN):
            value = vars(part)[attribute]
            viewing = isinstance(value, torch.Tensor) and not memory_of([value]).isdisjoint(weights)
            if not viewing and is_plain(value):
                yield f"{prefix}{attribute}", _Place(vars(part), attribute)


def _kept(value: Any) -> tuple[Any, dict[str, torch.Tensor] | None]:
    tensors, skeleton = split(value)
    if sum(tensor.nbytes for tensor in tensors.values()) > _KEPT_BYTES:
        return skeleton, None
    copies = {
        name: tensor.detach().clone(memory_format=torch.preserve_format) for name, tensor in tensors.items()
    }
    return json.loads(json.dumps(skeleton)), copies


def _again(begun: _Value, path: str) -> Any:
    if begun.tensors is None:
        raise ServiceError(f"{path} of a module has changed, and is too large to be kept as it was")
    return join(begun.skeleton, {name: tensor.clone() for name, tensor in begun.tensors.items()})


def _same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal bit by bit, regardless of strides."""
    (mine, told), (theirs, as_told) = split(one), split(other)
    return (
        _unlaid(told) == _unlaid(as_told)
        and mine.keys() == theirs.keys()
        and not any(differ([(tensor, theirs[name]) for name, tensor in mine.items()]))
    )


def _unlaid(skeleton: Any) -> Any:
    if isinstance(skeleton, dict):
        return {key: _unlaid(item) for key, item in skeleton.items() if key != "stride"}
    return [_unlaid(item) for item in skeleton] if isinstance(skeleton, list) else skeleton


class _Holder:
    __slots__ = ("but", "holder", "mutable", "seen")

    def __init__(self, holder: dict[str, Any], but: frozenset[str]):
        self.holder, self.but = holder, but
        self.seen: dict[str, Any] = {}
        self.mutable: list[Any] = []
        self.refresh()

    def refresh(self) -> None:
        """(every step, each module) Records the current values. The common case, no change, returns early."""
        holder, seen = self.holder, self.seen
        if (
            len(holder) == len(seen)
            and all(map(is_, holder.values(), seen.values()))
            and list(holder) == list(seen)
        ):
            return
        self.seen = holder.copy()
        self.mutable = [
            value
            for name, value in holder.items()
            if name not in self.but and not isinstance(value, _NUMBERS) and is_plain(value)
        ]

    @property
    def changed(self) -> bool:
        names = [name for name in (*self.holder, *self.seen) if name not in self.but]
        return any(self.holder.get(name, self) is not self.seen.get(name, self) for name in names)

    def restore(self) -> None:
        for name in [name for name in self.holder if name not in self.seen and name not in self.but]:
            del self.holder[name]
        for name, value in self.seen.items():
            if name not in self.but and self.holder.get(name, self) is not value:
                self.holder[name] = value


class _Copy:
    __slots__ = ("copied_at", "reused", "silent", "value", "was")

    def __init__(self, value: Any, *, silent: bool = False):
        """`silent`: the value is known to change without its version counter (by `.data`, by numpy)."""
        self.value, self.silent = value, silent
        self.was: Any = value.copy() if isinstance(value, np.ndarray) else value.detach().clone()
        self.copied_at = self._address_and_version()
        self.reused = 0
        """Number of steps that the copy has served after its first one."""

    def _address_and_version(self) -> tuple[int, int] | None:
        if isinstance(self.value, np.ndarray) or self.value.is_inference():
            return None
        return self.value.data_ptr(), self.value._version

    @property
    def stands(self) -> bool:
        """Returns whether a large tensor is unchanged as far as torch knows."""
        large = isinstance(self.value, torch.Tensor) and self.value.nbytes >= _LARGE_BYTES
        known = large and self.alike and self.copied_at is not None
        return known and self._address_and_version() == self.copied_at

    @property
    def alike(self) -> bool:
        """Returns whether it is a tensor of the form that it had: its bits decide whether it has changed."""
        return isinstance(self.value, torch.Tensor) and (self.value.shape, self.value.dtype) == (
            self.was.shape,
            self.was.dtype,
        )

    @property
    def changed(self) -> bool:
        """Returns whether an array or a tensor of another form has changed."""
        return isinstance(self.value, torch.Tensor) or bool(self.value.tobytes() != self.was.tobytes())

    def restore(self) -> None:
        if isinstance(self.value, np.ndarray):
            self.value[...] = self.was
            return
        with torch.no_grad():
            if self.alike:
                self.value.detach().copy_(self.was)
            else:
                self.value.data = self.was.clone()


class _Contents:
    __slots__ = ("value", "was")

    def __init__(self, value: Any):
        self.value, self.was = value, value.copy()

    @property
    def changed(self) -> bool:
        return len(self.value) != len(self.was) or not all(
            map(is_, self._items(self.value), self._items(self.was))
        )

    @staticmethod
    def _items(container: Any) -> list[Any]:
        return [*container, *container.values()] if isinstance(container, dict) else list(container)

    def restore(self) -> None:
        _filled(self.value, self.was)


class KeptModules:
    """A snapshot of modules: ``keep()`` … ``changed``, ``restore()``; ``keep()`` again.

    It is taken before every step. So it only copies values that are small or have changed since the last one.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], *, parameters: bool = False):
        """`parameters`: also keeps the parameters' values."""
        self.roots = list(modules)
        self._parameters = parameters
        self._flags: list[tuple[torch.nn.Parameter, bool]] = []
        self._holders: dict[int, _Holder] = {}
        self._copies: dict[int, _Copy] = {}
        self._kept: dict[int, _Holder | _Copy | _Contents] = {}
        self._weights: set[int] | None = None

    def keep(self, besides: Iterable[torch.Tensor] = ()) -> None:
        """Takes the snapshot. `besides`: further tensors whose values are kept."""
        before, self._copies = self._copies, {}
        holders, self._holders = self._holders, {}
        self._flags, self._kept, self._weights = [], {}, None
        for module in self._modules():
            if has_attributes(module):
                self._dictionary(vars(module), _MODULES_OWN, holders, before)
            if module._buffers:
                self._dictionary(module._buffers, frozenset(), holders, before)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._flags.append((parameter, parameter.requires_grad))
                    if self._parameters:
                        self._copy(parameter, before)
        for tensor in besides:
            self._copy(tensor, before)
        looked_at = [kept for kept in self._copies.values() if 0 < kept.reused <= _STEPS_LOOKED_AT]
        for kept in _differing(looked_at):
            self._copies[id(kept.value)] = self._kept[id(kept.value)] = _Copy(kept.value, silent=True)

    def _dictionary(
        self,
        holder: dict[str, Any],
        but: frozenset[str],
        holders: Mapping[int, _Holder],
        before: Mapping[int, _Copy],
    ) -> None:
        kept = holders.get(id(holder))
        if kept is None or kept.holder is not holder:
            kept = _Holder(holder, but)
        else:
            kept.refresh()
        self._holders[id(holder)] = self._kept[id(holder)] = kept
        left = list(kept.mutable)
        while left:
            value = left.pop()
            if id(value) in self._kept:
                continue
            if isinstance(value, torch.Tensor | np.ndarray):
                if not self._views_weights(value):
                    self._copy(value, before)
            elif type(value) in (list, set, deque, *_NAMED):
                self._kept[id(value)] = _Contents(value)
            if type(value) in _NAMED:
                left.extend(value.values())
            elif type(value) in _LISTED:
                left.extend(value)

    def _views_weights(self, value: Any) -> bool:
        """Returns whether a tensor shares memory with a parameter; parameters are restored by other means."""
        if isinstance(value, np.ndarray):
            return False
        if self._weights is None:
            parameters = (p for module in self._modules() for p in module._parameters.values())
            self._weights = memory_of(p for p in parameters if p is not None)
        return not memory_of([value]).isdisjoint(self._weights)

    def _copy(self, value: Any, before: Mapping[int, _Copy]) -> None:
        if isinstance(value, torch.Tensor) and not plain_tensor(value):
            return
        kept = before.get(id(value))
        if kept is None or kept.value is not value:
            kept = _Copy(value)
        elif kept.silent or not kept.stands:
            kept = _Copy(value, silent=kept.silent)
        else:
            kept.reused += 1
        self._copies[id(value)] = self._kept[id(value)] = kept

    def lend(self) -> None:
        """(after `keep`) Replaces buffers by copies until `restore`. So a forward does not change in place the buffers
        that other forwards' graphs have saved: autograd would refuse their backward.

        Buffers that share memory get copies that share memory. Buffers that require gradients are not replaced."""
        memories: dict[int, torch.Tensor] = {}
        for module in self._modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and plain_tensor(buffer) and not buffer.requires_grad:
                    module._buffers[name] = _copy_of(buffer, memories)

    def forget(self) -> None:
        self._kept = {}

    @property
    def changed(self) -> bool:
        return bool(self._changed())

    @property
    def lacks_values(self) -> bool:
        """Returns whether a large tensor has changed without its version counter, in this step or before it: its copy
        may be an older step's."""
        return bool(self._changed_silently())

    def _changed_silently(self) -> list[_Copy]:
        copies = [kept for kept in self._kept.values() if isinstance(kept, _Copy)]
        return _differing([kept for kept in copies if kept.reused and kept.stands])

    def _changed(self) -> list[_Holder | _Copy | _Contents]:
        """Returns what has changed. Compares tensors where they are."""
        alike = [kept for kept in self._kept.values() if isinstance(kept, _Copy) and kept.alike]
        compared = set(map(id, alike))
        others = [kept for kept in self._kept.values() if id(kept) not in compared and kept.changed]
        return [*_differing(alike), *others]

    def restore(self) -> None:
        for copied in self._changed_silently():
            copied.silent = True
        for kept in self._changed():
            kept.restore()
        for parameter, trained in self._flags:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        self._kept, self._flags = {}, []

    def _modules(self) -> Iterator[torch.nn.Module]:
        # Runs in every step, so not by torch's `modules()`, which builds names.
        left, seen = list(self.roots), set()
        while left:
            module = left.pop()
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                left.extend(module._modules.values())  # type: ignore[arg-type]
                yield module


def _differing(copies: Sequence[_Copy]) -> list[_Copy]:
    differs = differ([(kept.value, kept.was) for kept in copies])
    return [kept for kept, other in zip(copies, differs, strict=True) if other]


def _copy_of(buffer: torch.Tensor, memories: dict[int, torch.Tensor]) -> torch.Tensor:
    """Returns the same view of a copy of the buffer's memory. `memories`: copies so far, by the original's address."""
    memory = buffer.untyped_storage()
    address = memory.data_ptr()
    if address not in memories:
        whole = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        memories[address] = whole.set_(memory).clone()
    copy = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    return copy.set_(
        memories[address].untyped_storage(), buffer.storage_offset(), buffer.shape, buffer.stride()
    )


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Adds the object's name, `what`, to errors that the trainer's own objects raise in the block. Raises ServiceError
    in place of an exception that is not a SwiftError."""
    try:
        yield
    except SwiftError as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:
        raise ServiceError(f"{what} cannot load its state: {type(error).__name__}: {error}") from error


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Returns the optimizers' state_dicts. Raises UsageError for an optimizer whose state_dict() fails."""
    states = []
    for optimizer in optimizers:
        try:
            states.append(optimizer.state_dict())
        # super().__init__() was not called, or parameters changed under its state
        except (AttributeError, KeyError) as error:
            raise UsageError(
                f"{type(optimizer).__name__}.state_dict() fails ({type(error).__name__}: {error}): an optimizer "
                "calls super().__init__(), and its state is of the parameters in its groups"
            ) from error
    return states


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads an optimizer's state. Raises ServiceError if its `state_dict` differs from `saved` afterwards."""
    state, groups = optimizer.state, optimizer.param_groups
    try:
        with torch_private.state_left_alone():
            optimizer.load_state_dict(saved)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ServiceError(f"{type(optimizer).__name__} does not take its state back: {error}") from error
    _keep_shared(optimizer, state, groups)
    if not _difference(saved, optimizer.state_dict()):
        return
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        # torch rebuilds containers of the state, and some of them wrongly (strings, named tuples).
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for index, parameter in enumerate(parameters):
            if index in saved["state"]:
                optimizer.state[parameter] = saved["state"][index]
    if path := _difference(saved, optimizer.state_dict()):
        raise ServiceError(
            f"{type(optimizer).__name__} does not take its state back: {path} is another one than was given to "
            "load_state_dict; let state_dict and load_state_dict agree"
        )


def _keep_shared(optimizer: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]]) -> None:
    """Puts the loaded state and groups back into the original objects. torch replaces both, but a wrapper (SAM,
    Lookahead) shares its own with an inner optimizer."""
    sharing = [optimizer, *(v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer))]
    made, loaded = optimizer.state, optimizer.param_groups
    if made is not state:
        # Into the existing tensors: they may be views of others.
        values = {parameter: put_into(state.get(parameter), value) for parameter, value in made.items()}
        state.clear()
        state.update(values)
    if loaded is not groups:
        for group, value in zip(groups, loaded, strict=False):
            group.clear()
            group.update(value)
        groups[:] = [*groups[: len(loaded)], *loaded[len(groups) :]]
    for each in sharing:  # some pass it on by themselves
        if each.state is made:
            each.state = state
        if each.param_groups is loaded:
            each.param_groups = groups


def state_of_module(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the module's `state_dict` as `load_module` takes it: what the module holds, under its own names."""
    with torch_private.without_hooks_of_authors(module):
        return module.state_dict()


def load_module(module: torch.nn.Module, saved: dict[str, Any], begun: Collection[str] | None = None) -> None:
    """Loads a module's state. Raises ServiceError if its parameters differ. `begun`: buffers at the process's start."""
    _make_buffers(module, saved, begun)
    for name, parameter in module.named_parameters():
        value = saved.get(name)
        if isinstance(value, torch.Tensor) and value.dtype != parameter.dtype:  # torch would cast the value
            raise ServiceError(f"{name} is {value.dtype} in the state, and {parameter.dtype} in this process")
    try:
        with torch_private.without_hooks_of_authors(module):
            module.load_state_dict(saved)
    except RuntimeError as error:
        raise ServiceError(" ".join(str(error).split())) from error
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, tensor in own.items():
            value = saved.get(name)
            if not isinstance(value, torch.Tensor) or local(value).stride() == local(tensor).stride():
                continue
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and value.shape == tensor.shape:
                tensor.data = value.detach().clone(memory_format=torch.preserve_format)


def _make_buffers(module: torch.nn.Module, saved: dict[str, Any], begun: Collection[str] | None) -> None:
    """Creates the saved buffers that are missing and removes those that are not saved: a forward may create buffers.
    Gives the others the saved dtype and shape."""
    own = state_of_module(module)
    for name, buffer in list(module.named_buffers()):
        value = saved.get(name)
        if type(value) is type(buffer) is torch.Tensor and _form(value) != _form(buffer):
            prefix, _, last = name.rpartition(".")
            module.get_submodule(prefix)._buffers[last] = torch.empty_like(value)
    for name in saved.keys() - own.keys():
        prefix, _, last = name.rpartition(".")
        try:
            owner = module.get_submodule(prefix)
        except AttributeError:
            continue  # load_state_dict reports it
        if isinstance(saved[name], torch.Tensor) and last not in owner._parameters and last != "_extra_state":
            owner._buffers[last] = torch.empty_like(saved[name])
    for name in own.keys() - saved.keys():
        prefix, _, last = name.rpartition(".")
        owner = module.get_submodule(prefix)
        if last in owner._buffers and begun is not None:
            if name in begun:
                owner._buffers[last] = None
            else:
                del owner._buffers[last]


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _difference(one: Any, other: Any) -> str:
    """Returns a path at which the two states differ, or ""."""
    (mine, words), (theirs, other_words) = split(one), split(other)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for path, tensor in mine.items():
        again = theirs.get(path)
        if again is None:
            return path
        if again is tensor:
            continue
        if (again.dtype, again.shape, local(again).stride()) != (
            tensor.dtype,
            tensor.shape,
            local(tensor).stride(),
        ):
            return path
        pairs[path] = local(again), local(tensor)
    found = next((path for path, other in zip(pairs, differ([*pairs.values()]), strict=True) if other), "")
    return found or ("" if words == other_words else "state")
