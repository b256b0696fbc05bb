"""Random generators that registered objects hold, and that their states may lack: a data set's own, a sampler's.

`load_state_dict` of a loader goes to a position. A generator that is seeded or made anew there is what it is to be. One
from which a data set has drawn since its first batch is not: it is captured besides, by its path
(``loader.dataset.rng``). Which of them it is, shows: all are given other numbers before their objects load (`prepare`).
Objects that draw ahead in a thread are left alone: where such a generator is says nothing of what was given.

Of a data set's other attributes, `swift.runtime.script` looks at numbers, tensors and arrays with which it begins. What
it makes when it is asked first (a file that it opens, a length, a cache) is not looked at: it would make that again.

    (run) ``remember`` → (states) ``state`` … ``prepare``, the objects load, ``load``
    (step) ``begin_step`` … ``prepare``, the objects load, ``put_back``
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, Sampler

from swift.runtime._torch import is_loader_iterator
from swift.runtime.before import generator_state, object_of_ones_own
from swift.runtime.origin_loaders import OriginLoader
from swift.runtime.rng import kept
from swift.runtime.signs import Reads

_VISITED_MAX = 200
_ITEMS_MAX = 16
_DEEP = 8
_AHEAD = {"threading", "queue", "_queue", "concurrent", "multiprocessing", "asyncio"}
_SEED, _MARK = 0x5EED_0E1D, 0.5317301940917969
_SEEDED_BY_THE_SESSION: tuple[Any, ...] = (
    torch.default_generator,
    getattr(random, "_inst", None),
    getattr(np.random.mtrand, "_rand", None),
)


class Held:
    """Of one rank's registered objects."""

    def __init__(self) -> None:
        self._registered: Mapping[str, Any] = {}
        self._begun: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._first: dict[str, dict[str, Any]] = {}
        self._before: dict[str, tuple[Any, Any]] = {}

    def remember(self, registered: Mapping[str, Any]) -> None:
        """(before any state is loaded) With what a process begins. `registered`: by name."""
        self._registered = registered
        self._begun = self._now()
        self._first = {
            path: {n: v for n, v in vars(data).items() if _is_number(v) or _is_array(v)}
            for path, data in self._data().items()
        }

    def prepare(self) -> None:
        """(the objects are about to load) What loads finds other numbers, with a mark that seeds wipe out."""
        self._before = {path: (generator, _get(generator)) for path, generator in self._all().items()}
        for generator, state in self._before.values():
            _set(generator, _marked(generator, state))

    def numbers(self, reads: Reads) -> dict[str, dict[str, Any]]:
        """By the paths of data sets: their numbers, tensors and arrays. A number that its object's state has is shown
        as it was."""
        found: dict[str, dict[str, Any]] = {}
        for path, data in self._data().items():
            first = self._first.get(path, {})
            values = {n: v for n, v in vars(data).items() if n in first and reads(type(data), n)}
            if values:
                told = self._in_state(path.partition(".")[0])
                first.update({n: v for n, v in values.items() if not _is_number(v) or repr(v) not in told})
                found[path] = {name: first[name] for name in values}
        return found

    def begin_step(self) -> None:
        """What a step that is cut short gives back."""
        self._kept = self._now()

    def put_back(self) -> None:
        """(the step is dropped, and the objects have loaded what they were at its start)"""
        for path, generator, was in self._left_alone():
            _set(generator, self._kept.get(path, was))

    def lend(self) -> None:
        """(a step for another data-parallel rank begins) Loaders that were made for it draw on from where this rank's
        own are: all ranks have drawn as often."""
        for name, thing in self._registered.items():
            if isinstance(thing, OriginLoader) and thing.present is not thing.own:
                mine, theirs = (_below(name, loader) for loader in (thing.own, thing.present))
                for path in mine.keys() & theirs.keys():
                    if not isinstance(mine[path], Dataset):
                        _set(theirs[path], _get(mine[path]))

    def state(self) -> dict[str, Any]:
        """What is another one than at the beginning, and which that was."""
        begun = self._begun
        return {
            path: {"state": value, "begun": _sign(begun[path]) if path in begun else ""}
            for path, value in self._now().items()
            if path not in begun or _sign(value) != _sign(begun[path])
        }

    def load(self, told: Mapping[str, Any], *, replica: bool) -> list[str]:
        """Returns the paths of those that are lost. `replica`: the state is another rank's, which may have begun with
        other numbers."""
        lost = [path for path in told if path not in self._all()]
        for path, generator, was in self._left_alone():
            wanted = self._begun.get(path, was)
            if path in told and not (replica and self._is_apart(path, told)):
                wanted = told[path]["state"]
            elif path in told:
                lost.append(path)
            if not _set(generator, wanted):
                _set(generator, was)
                lost.append(path)
        return sorted(lost)

    def _now(self) -> dict[str, Any]:
        return {path: _get(generator) for path, generator in self._all().items()}

    def _left_alone(self) -> Iterator[tuple[str, Any, Any]]:
        """(since `prepare`) Those that have neither been seeded nor made anew, and what they were."""
        before, self._before = self._before, {}
        now = self._all()
        for path, (generator, was) in before.items():
            if now.get(path) is generator and _is_marked(generator):
                yield path, generator, was

    def _is_apart(self, path: str, told: Mapping[str, Any]) -> bool:
        """Each rank begins with one of its own."""
        return path in told and told[path]["begun"] != (
            _sign(self._begun[path]) if path in self._begun else ""
        )

    def _all(self) -> dict[str, Any]:
        known = set(map(id, (*self._registered.values(), *_SEEDED_BY_THE_SESSION)))
        return {
            path: part
            for path, part in self._parts().items()
            if id(part) not in known and not isinstance(part, Dataset)
        }

    def _data(self) -> dict[str, Any]:
        return {
            path: part
            for path, part in self._parts().items()
            if isinstance(part, Dataset) and object_of_ones_own(part)
        }

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name, registered in self._registered.items():
            thing = registered.own if isinstance(registered, OriginLoader) else registered
            if object_of_ones_own(thing):
                parts |= _below(name, thing)
        return parts

    def _in_state(self, name: str) -> set[str]:
        """The numbers of an object's state, as `repr` writes them."""
        with kept():
            left, told = [self._registered[name].state_dict()], set[str]()
        while left and len(told) < _VISITED_MAX:
            value = left.pop()
            if isinstance(value, dict | list | tuple | deque):
                left += list(value.values() if isinstance(value, dict) else value)[:_VISITED_MAX]
            elif _is_number(value):
                told.add(repr(value))
        return told


def _below(name: str, thing: Any) -> dict[str, Any]:
    """Generators and data sets that are found soon: it is looked for them in every step."""
    found: dict[str, Any] = {}
    left, seen = deque([(name, thing, 0)]), {id(thing)}
    while left and len(seen) < _VISITED_MAX:
        path, value, depth = left.popleft()
        for word, part in _parts_of(value):
            if id(part) in seen:
                continue
            own = object_of_ones_own(value)
            if own and type(part).__module__.partition(".")[0] in _AHEAD:
                return {}
            if generator_state(part) is not None:
                seen.add(id(part))
                found[f"{path}.{word}"] = part
                continue
            if isinstance(part, Dataset):
                found[f"{path}.{word}"] = part
            if depth < _DEEP and _has_parts(part):
                seen.add(id(part))
                left.append((f"{path}.{word}", part, depth + 1))
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _has_parts(value: Any) -> bool:
    if isinstance(value, list | tuple | dict | deque):
        return len(value) <= _ITEMS_MAX
    return isinstance(value, Dataset | Sampler | DataLoader) or (
        object_of_ones_own(value) or is_loader_iterator(value)
    )


def _parts_of(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, list | tuple | deque):
        return _numbered(value)
    return list(getattr(value, "__dict__", {}).items())


def _numbered(items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((str(number), part) for number, part in enumerate(items))


def _get(generator: Any) -> Any:
    state = generator_state(generator)
    assert state is not None
    return state[0]()


def _set(generator: Any, state: Any) -> bool:
    """Whether it is one of that kind."""
    accessors = generator_state(generator)
    assert accessors is not None
    try:
        accessors[1](state)
    except (TypeError, ValueError, KeyError, RuntimeError):
        return False
    return True


def _marked(generator: Any, state: Any) -> Any:
    """A state by which `_is_marked` knows it, whatever was drawn since. (A mark of `random` and of numpy's RandomState
    goes with a normal number that is drawn.)"""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(_SEED).get_state()
    if isinstance(generator, random.Random):
        return *state[:2], _MARK
    if isinstance(generator, np.random.RandomState):
        return state | {"has_gauss": 1, "gauss": _MARK}
    kind: Any = type(generator.bit_generator)
    return kind(_SEED).state


def _is_marked(generator: Any) -> bool:
    state = _get(generator)
    if isinstance(generator, torch.Generator):
        return generator.initial_seed() == _SEED
    if isinstance(generator, random.Random):
        return bool(state[2] == _MARK)
    if isinstance(generator, np.random.RandomState):
        return bool(state["gauss"] == _MARK)
    marked = _marked(generator, state)["state"]  # what drawing does not change of it
    return all(repr(state["state"][word]) == repr(marked[word]) for word in ("inc", "key") if word in marked)


def _sign(state: Any) -> str:
    data = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state).encode()
    return xxhash.xxh3_128_hexdigest(data)
