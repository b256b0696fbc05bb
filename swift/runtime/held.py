"""Random generators that registered objects hold, and that their states may lack: a data set's own, a sampler's.

`load_state_dict` of a loader goes to a position. A generator that is seeded or made anew there is what it is to be. One
from which a data set has drawn since its first batch is not: it is captured besides, by its path
(``loader.dataset.rng``), and set once its object has loaded. Which of them it is, shows: before their objects load, all
get a mark that changes none of their numbers, and that seeding wipes out (`_Marked`). Objects that draw ahead in a
thread are left alone: where such a generator is says nothing of what was given.

Of a data set's other attributes, `swift.runtime.script` looks at numbers, tensors and arrays with which it begins. What
it makes when it is asked first (a file that it opens, a length, a cache) is not looked at: it would make that again.

    (run) ``remember`` → (states) ``state`` … ``prepare``, the objects load, ``load``
    (step) ``begin_step`` … ``prepare``, the objects load, ``put_back``
"""

import functools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, Sampler

from swift.runtime._torch import is_loader_iterator
from swift.runtime.before import generator_state, object_of_ones_own, own_attributes
from swift.runtime.origin_loaders import OriginLoader
from swift.runtime.rng import kept
from swift.runtime.signs import Reads

_VISITED_MAX = 200
_ITEMS_MAX = 16
_DEEP = 8
_AHEAD = {"threading", "queue", "_queue", "concurrent", "multiprocessing", "asyncio"}
_MARK = 0.5317301940917969
_TORCH_SECOND, _TORCH_KEPT = slice(5024, 5032), 5040
"""Bytes of a torch generator's state: of doubles."""
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
        self._marked: dict[str, _Marked] = {}

    def remember(self, registered: Mapping[str, Any]) -> None:
        """(before any state is loaded) With what a process begins. `registered`: by name."""
        self._registered = registered
        self._begun = self._now()
        self._first = {
            path: {n: v for n, v in vars(data).items() if _is_number(v) or _is_array(v)}
            for path, data in self._data().items()
        }

    def prepare(self) -> None:
        """(the objects are about to load) They may draw; what they seed is known later."""
        self._marked = {path: _Marked(generator) for path, generator in self._all().items()}

    def numbers(self, reads: Reads) -> dict[str, dict[str, Any]]:
        """By the paths of data sets: their numbers, tensors and arrays. A number that its object's state has is shown
        as it was."""
        found: dict[str, dict[str, Any]] = {}
        states: dict[str, set[str]] = {}
        for path, data in self._data().items():
            first = self._first.get(path, {})
            values = {n: v for n, v in vars(data).items() if n in first and reads(type(data), n)}
            if values:
                name = path.partition(".")[0]
                told = states[name] = states[name] if name in states else self._in_state(name)
                first.update({n: v for n, v in values.items() if not _is_number(v) or repr(v) not in told})
                found[path] = {name: first[name] for name in values}
        return found

    def begin_step(self) -> None:
        """What a step that is cut short gives back."""
        self._kept = self._now()

    def put_back(self) -> None:
        """(the step is dropped, and the objects have loaded what they were at its start)"""
        for path, generator in self._unseeded():
            if path in self._kept:
                _set(generator, self._kept[path])

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
        lost = {path for path in told if path not in self._all()}
        for path, generator in self._unseeded():
            wanted = self._begun.get(path)
            if path in told and replica and self._is_apart(path, told):
                lost.add(path)
            elif path in told:
                wanted = told[path]["state"]
            if wanted is not None and not _set(generator, wanted):
                lost.add(path)
        return sorted(lost)

    def _now(self) -> dict[str, Any]:
        return {path: _get(generator) for path, generator in self._all().items()}

    def _unseeded(self) -> list[tuple[str, Any]]:
        """(since `prepare`) Those that have neither been seeded nor made anew. All marks are off."""
        marked, self._marked = self._marked, {}
        now = self._all()
        kept = {path: one.generator for path, one in marked.items() if one.take_off()}
        return [(path, generator) for path, generator in kept.items() if now.get(path) is generator]

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
        return [(str(key), part) for key, part in dict.items(value)]
    if isinstance(value, list | tuple | deque):
        return _numbered(value)
    return list((own_attributes(value) or {}).items())


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


class _Marked:
    """``_Marked(generator)`` … ``take_off()``

    A normal number is drawn with a second one, which is kept for the next time: there is the mark, if none is kept. A
    numpy Generator keeps half of a word so; what is there while none is kept counts for nothing.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        state = _get(generator)
        self._seed, self._was = _seed_of(generator, state), _slot_of(generator, state)
        self._is_on = self._was is not None and not self._was[0]
        if self._is_on:
            _set(generator, _with_slot(generator, state, (True, _MARK)))

    def take_off(self) -> bool:
        """Returns whether it was not seeded since."""
        state = _get(self.generator)
        same = bool(self._seed == _seed_of(self.generator, state))
        if not self._is_on:
            return same
        assert self._was is not None
        marked = _slot_of(self.generator, state) == _slot_of(
            self.generator, _with_slot(self.generator, state, (True, _MARK))
        )
        if marked:
            _set(self.generator, _with_slot(self.generator, state, self._was))
        # Halves of words are drawn often: then the seed has to do.
        return same and (marked or isinstance(self.generator, np.random.Generator))


def _seed_of(generator: Any, state: Any) -> Any:
    """What of it another seed changes, and drawing does not."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    if isinstance(generator, np.random.Generator):
        return repr([state["state"][word] for word in ("inc", "key") if word in state["state"]])
    return None


_Slot = tuple[bool, float]
"""Whether a number is kept there, and what is there."""


def _slot_of(generator: Any, state: Any) -> _Slot | None:
    """None: it has none."""
    if isinstance(generator, torch.Generator):
        if generator.device.type != "cpu" or not _has_second_normal():
            return None
        return bool(state[_TORCH_KEPT]), float(state[_TORCH_SECOND].view(torch.float64))
    if isinstance(generator, random.Random):
        return state[2] is not None, state[2] or 0.0
    if isinstance(generator, np.random.RandomState):
        return bool(state["has_gauss"]), state["gauss"]
    return bool(state["has_uint32"]), float(state["uinteger"])


def _with_slot(generator: Any, state: Any, slot: _Slot) -> Any:
    kept, value = slot
    if isinstance(generator, torch.Generator):
        state = state.clone()
        state[_TORCH_KEPT] = int(kept)
        state[_TORCH_SECOND] = torch.tensor([value], dtype=torch.float64).view(torch.uint8)
        return state
    if isinstance(generator, random.Random):
        return *state[:2], value if kept else None
    if isinstance(generator, np.random.RandomState):
        return state | {"has_gauss": int(kept), "gauss": value}
    return state | {"uinteger": int(value * (1 << 32)) if kept else int(value)}


@functools.cache
def _has_second_normal() -> bool:
    """This torch keeps the second one of two normal numbers there."""
    one = torch.Generator().manual_seed(0)
    state = one.get_state()
    if len(state) <= _TORCH_KEPT or state[_TORCH_KEPT]:
        return False
    one.set_state(_with_slot(one, state, (True, _MARK)))
    drawn = torch.empty(1, dtype=torch.float64, device="cpu").normal_(generator=one)
    return float(drawn) == _MARK and one.initial_seed() == 0


def _sign(state: Any) -> str:
    data = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state).encode()
    return xxhash.xxh3_128_hexdigest(data)
