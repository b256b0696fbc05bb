"""Data loaders of more than one data-parallel rank (*origin*) in one process, at one position.

A registered object has the same state on all replicas (`swift_ft.train.verification`). So a loader that was created for
another origin gives that origin's next batch, once it has this rank's state (`TrainerState.draw_as_other`).
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from swift_ft import torch_private
from swift_ft.errors import UsageError
from swift_ft.state.rng import Randomness, kept, seed_all, seed_for
from swift_ft.text import tell

Make = Callable[[int], Any]


class OriginLoader:
    """The loaders of all requested origins, as one object; see `Session.loader`.

    Attributes and items are those of the loader of the origin whose batch is computed. The state is that of this rank's
    own loader. An attribute that is set on this rank's own loader is set on the others as well.
    """

    _make: Make
    _own: int
    _origin: Callable[[], int]
    _made: dict[int, Any]
    _set: dict[str, Any]
    """Attributes that the trainer has set on this rank's own loader."""

    def __init__(self, make: Make, own: int, origin: Callable[[], int]) -> None:
        """Raises UsageError for a loader without a state."""
        parts = {"_make": make, "_own": own, "_origin": origin, "_made": {own: make(own)}, "_set": {}}
        vars(self).update(parts)  # `__setattr__` sets the loader's attributes
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(self._made[own], method, None)):
                raise UsageError(
                    f"session.loader was given what makes a {type(self._made[own]).__name__} without {method}(); a "
                    "recovery must be able to take it back, so give it state_dict and load_state_dict"
                )

    @property
    def present(self) -> Any:
        return self._made[self._origin()]

    @property
    def own(self) -> Any:
        return self._made[self._own]

    @property
    def made(self) -> Mapping[int, Any]:
        return self._made

    def begin(self, origin: int) -> None:
        """Begins a step for this origin. Its loader keeps a state of its own until it is given this rank's."""
        if origin == self._own:
            return
        if origin not in self._made:
            self._made[origin] = self._make(origin)
        for name, value in self._set.items():
            setattr(self._made[origin], name, value)

    def state_dict(self) -> Any:
        return self._made[self._own].state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Loads the state into the loader of the origin whose batch is computed."""
        self.present.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # an attribute of this object that is not set yet
            raise AttributeError(name)
        return getattr(self.present, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.present, name, value)
        if self._origin() == self._own:
            self._set[name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.present(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.present[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.present)

    def __next__(self) -> Any:
        return next(self.present)

    def __len__(self) -> int:
        return len(self.present)


class OriginLoaders:
    def __init__(self) -> None:
        self._loaders: list[OriginLoader] = []
        self.names: list[str] = []
        """Names under which their states are registered."""

    def add(self, loader: OriginLoader, name: str) -> None:
        self._loaders.append(loader)
        self.names.append(name)

    def begin(self, origin: int) -> None:
        for loader in self._loaders:
            loader.begin(origin)


# Iterators of torch's DataLoader, so that a recreated one gives the same batches.
#
# A DataLoader without a generator of its own draws from the default one when an iterator is created, and while it runs
# (shuffling, seeds of workers, a dataset's augmentation). An iterator is recreated when a registered object's
# `load_state_dict` rebuilds it: elsewhere in the program, where other numbers would be drawn. So each has a seed of its
# own, by which its batches are drawn, one by one; and a recreated one gets the seed of the lost one.
#
# A seed follows from where the iterator was created: the step, and its number there. Those created before the first
# step take theirs from torch's default generator, as the trainer has seeded it. A recreated iterator is recognized by
# its loader's place in the registered objects, and by the kind of loader.
#
# Workers draw by the seed that they were started with, and `persistent_workers` would continue with their draws of all
# earlier epochs. So each iterator starts its own workers.
#
#     (session) ``install`` → (trainer) ``iter(loader)`` …; (state) ``state`` … ``restore``

BEFORE_RUN = -1
_DEPTH_MAX, _VALUES_MAX = 5, 2000
"""Limits of the search for a loader in registered objects: depth, and number of values."""


class Made(NamedTuple):
    """An iterator, identified by where it was created and from which loader."""

    kind: str
    step: int
    number: int
    place: str
    """Place of its loader in the registered objects; empty if it is in none."""


class Iterators:
    def __init__(self, randomness: Randomness, objects: Callable[[], Mapping[str, Any]]) -> None:
        """`objects`: returns the registered objects by name."""
        self.randomness = randomness
        self._objects = objects
        self.step = BEFORE_RUN
        self._count = 0
        self._born: dict[int, int] = {}
        """Seeds of iterators that were created before the first step, by number."""
        self._live: dict[tuple[str, int, int], tuple[weakref.ref[Any], weakref.ref[DataLoader[Any]]]] = {}
        self._lost: list[Made] = []
        """Iterators of the restored state that have not been recreated yet."""
        self._places: weakref.WeakKeyDictionary[DataLoader[Any], tuple[str, int]] = (
            weakref.WeakKeyDictionary()
        )
        """Loader -> its place, and the number of registered objects that were searched."""
        self._told = False
        """True once the trainer has been warned that workers do not persist."""
        self._making = False
        self._others = 0

    def install(self) -> None:
        """Takes over the creation of iterators by all data loaders of this process."""
        torch_private.make_iterators_by(self._make, self._begin)

    def begin_step(self, step: int) -> None:
        self.step, self._count, self._others = step, 0, 0

    def state(self) -> list[list[Any]]:
        """(between steps) Returns the unfinished iterators, in the order of their creation."""
        under_way = sorted(self._under_way(), key=lambda iterator: (iterator.step, iterator.number))
        lost = {made[:3] for made in self._lost}
        return [list(made) for made in [*self._lost, *(made for made in under_way if made[:3] not in lost)]]

    def _under_way(self) -> Iterator[Made]:
        for made, references in list(self._live.items()):
            iterator, loader = references[0](), references[1]()
            if iterator is None or iterator._next_data.ended:
                del self._live[made]
            else:
                yield Made(*made, "" if loader is None else self._place(loader))

    def restore(self, state: list[list[Any]]) -> None:
        """(before objects load their states) Forgets the current iterators and expects the state's to be recreated."""
        self._live.clear()
        self._lost = [
            Made(str(kind), int(step), int(count), str(*place)) for kind, step, count, *place in state
        ]

    def _make(self, loader: DataLoader[Any], make: Any) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            return make(loader)
        if loader.persistent_workers:
            self._start_workers_anew(loader)
        if loader.generator is not None:
            return make(loader)
        made = self._number(_kind(loader), self._place(loader))
        seed = self._seed(made)
        with kept():
            seed_all(seed)
            self._making = True
            try:
                iterator = make(loader)
            finally:
                self._making = False
        # torch's class has the method under this name.
        iterator._next_data = _Batches(type(iterator)._next_data, weakref.ref(iterator), seed)
        self._live[made] = weakref.ref(iterator), weakref.ref(loader)
        return iterator

    def _begin(self, iterator: Any, loader: DataLoader[Any], begin: Any) -> None:
        """Begins an iterator of another package's class (torchdata's StatefulDataLoader). It draws a seed for its
        workers, which may be part of its state. So the seed does not come from the default generator, which differs
        between replicas."""
        own = torch.utils.data.get_worker_info() is not None or loader.generator is not None
        if self._making or own:
            begin(iterator, loader)
            return
        loader.generator = torch.Generator().manual_seed(self.randomness.workers(self.step, self._others))
        self._others += 1
        try:
            begin(iterator, loader)
        finally:
            loader.generator = None
        if loader.num_workers:  # makes a load of this one detectable: workers' draws are in no state
            torch.empty((), dtype=torch.int64).random_()

    def _start_workers_anew(self, loader: DataLoader[Any]) -> None:
        torch_private.start_workers_anew(loader)
        if not self._told:
            self._told = True
            tell(
                "a DataLoader has persistent_workers=True: with a session its workers start anew with each iterator, "
                "from the dataset as this process has it; what workers keep from one epoch to the next is gone"
            )

    def _number(self, kind: str, place: str) -> tuple[str, int, int]:
        same = [made for made in self._lost if made.kind == kind]
        lost = next((made for made in same if made.place == place), None)
        # An iterator has no place if its loader is not registered, or was not when it was created.
        lost = lost or next((made for made in same if not (made.place and place)), None)
        # It may be recreated at another place, if its old place no longer has a loader.
        lost = lost or next((made for made in same if not has_loader(made.place, self._objects())), None)
        if lost is not None:
            self._lost.remove(lost)
            return lost.kind, lost.step, lost.number
        self._count += 1
        return kind, self.step, self._count - 1

    def _place(self, loader: DataLoader[Any]) -> str:
        objects = self._objects()
        place, count = self._places.get(loader, ("", -1))
        if not place and count != len(objects):
            place = place_of(loader, objects)
            self._places[loader] = place, len(objects)
        return place

    def _seed(self, made: tuple[str, int, int]) -> int:
        _, step, count = made
        if step != BEFORE_RUN:
            return self.randomness.iterator(step, count)
        if count not in self._born:
            self._born[count] = int(torch.empty((), dtype=torch.int64).random_().item())
        return self._born[count]


class _Batches:
    """A replacement of an iterator's `_next_data` that seeds each batch."""

    def __init__(self, inner: Any, iterator: "weakref.ref[Any]", seed: int) -> None:
        self._inner, self._iterator, self._seed = inner, iterator, seed
        self._count = 0
        self.ended = False

    def __call__(self) -> Any:
        self._count += 1
        with kept():
            seed_all(seed_for(self._seed, self._count, 0, 0))
            try:
                return self._inner(self._iterator())
            except StopIteration:
                self.ended = True
                raise


def place_of(loader: DataLoader[Any], objects: Mapping[str, Any]) -> str:
    """Returns the path at which a registered object holds the loader (``data.loader``), "" if the search finds none. It
    is equal for the loaders of all data-parallel ranks (`session.loader`)."""
    return next((path for path, value in _walk(objects) if value is loader), "")


def has_loader(place: str, objects: Mapping[str, Any]) -> bool:
    return any(path == place and isinstance(value, DataLoader) for path, value in _walk(objects))


def _walk(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields values inside registered objects, by path; a value that two objects share comes twice."""
    left = deque[tuple[str, Any, int]]()
    for name, value in objects.items():
        made = value.made.values() if isinstance(value, OriginLoader) else (value,)
        left.extend((name, each, 0) for each in made)
    seen = set[int]()
    while left and len(seen) < _VALUES_MAX:
        path, value, depth = left.popleft()
        yield path, value
        if id(value) in seen or depth > _DEPTH_MAX or isinstance(value, torch.Tensor | torch.nn.Module):
            continue
        seen.add(id(value))
        left.extend((f"{path}.{name}", inner, depth + 1) for name, inner in _inner(value))


def _inner(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from list(value.items())[:_VALUES_MAX]
    elif isinstance(value, list | tuple):
        yield from enumerate(value[:_VALUES_MAX])
    elif not isinstance(value, type):
        yield from list(_attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    """Returns its ``__dict__``, without calling a ``__getattr__`` of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _kind(loader: DataLoader[Any]) -> str:
    sampler = loader.batch_sampler if loader.sampler is None else loader.sampler
    return f"{type(loader.dataset).__qualname__}/{type(sampler).__qualname__}/{loader.batch_size}"
