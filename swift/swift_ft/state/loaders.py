"""Data loaders of more than one data-parallel rank (*origin*) in one process, at one position.

What a trainer registers has the same state on all replicas (`swift_ft.train.verification`). So a loader that was made
for another origin gives that one's next batch, once it has this rank's state (`TrainerState.draw_as_other`).
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
    """A loader for each origin that is asked for, as one object; see `Session.loader`.

    All but its state is that of the loader of the origin whose batch is computed; its state is that of this rank's own.
    An attribute that is set for this rank's own is set for the others' as well.
    """

    _make: Make
    _own: int
    _origin: Callable[[], int]
    _made: dict[int, Any]
    _set: dict[str, Any]
    """By the trainer, at this rank's own."""

    def __init__(self, make: Make, own: int, origin: Callable[[], int]) -> None:
        """Raises UsageError for a loader without a state."""
        parts = {"_make": make, "_own": own, "_origin": origin, "_made": {own: make(own)}, "_set": {}}
        vars(self).update(parts)  # `__setattr__` sets what is the loader's
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(self._made[own], method, None)):
                raise UsageError(
                    f"session.loader was given what makes a {type(self._made[own]).__name__} without {method}(); a "
                    "recovery must be able to take it back, so give it state_dict and load_state_dict"
                )

    @property
    def present(self) -> Any:
        """The loader of the origin whose batch is computed."""
        return self._made[self._origin()]

    @property
    def own(self) -> Any:
        """The loader of this rank's own data-parallel rank."""
        return self._made[self._own]

    @property
    def made(self) -> Mapping[int, Any]:
        """By origin."""
        return self._made

    def begin(self, origin: int) -> None:
        """A step is computed for this origin. Its loader has a state of its own until it is given this rank's."""
        if origin == self._own:
            return
        if origin not in self._made:
            self._made[origin] = self._make(origin)
        for name, value in self._set.items():
            setattr(self._made[origin], name, value)

    def state_dict(self) -> Any:
        """Of this rank's own."""
        return self._made[self._own].state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Into the one of the origin whose batch is computed."""
        self.present.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of this object, and not there yet
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
    """All of a session."""

    def __init__(self) -> None:
        self._loaders: list[OriginLoader] = []
        self.names: list[str] = []
        """By which their states are registered."""

    def add(self, loader: OriginLoader, name: str) -> None:
        self._loaders.append(loader)
        self.names.append(name)

    def begin(self, origin: int) -> None:
        for loader in self._loaders:
            loader.begin(origin)


# Iterators of torch's DataLoader, so that one that is made again gives the same batches.
#
# A DataLoader without a generator of its own draws from the default one when an iterator is made, and while it runs
# (shuffling, seeds of workers, a dataset's augmentation). An iterator is made again when a registered object's
# `load_state_dict` rebuilds it: in another place, where other numbers would be drawn. So each has a seed of its own, by
# which its batches are drawn, one by one; and who makes it again gets the seed of the one that was lost.
#
# A seed is told by where the iterator was made: the step, and its number there. Those that are made before the first
# step take theirs from torch's default generator, as the trainer has seeded it. Which iterator is made again is told by
# its loader's place in the registered objects, and by what kind of loader it is.
#
# Workers draw by the seed that they were started with, and `persistent_workers` would go on with what they have drawn
# in all epochs before. So each iterator starts its own.
#
#     (session) ``install`` → (trainer) ``iter(loader)`` …; (state) ``state`` … ``restore``

BEFORE_RUN = -1
_DEPTH_MAX, _VALUES_MAX = 5, 2000
"""How far a loader is looked for in registered objects."""


class Made(NamedTuple):
    """An iterator, by where and of what it was made."""

    kind: str
    step: int
    number: int
    place: str
    """Of its loader in the registered objects; empty: it is in none."""


class Iterators:
    """Of one rank's data loaders."""

    def __init__(self, randomness: Randomness, objects: Callable[[], Mapping[str, Any]]) -> None:
        """`objects`: those that are registered, by name."""
        self.randomness = randomness
        self._objects = objects
        self.step = BEFORE_RUN
        self._count = 0
        self._born: dict[int, int] = {}
        """Seeds of those that were made before the first step."""
        self._live: dict[tuple[str, int, int], tuple[weakref.ref[Any], weakref.ref[DataLoader[Any]]]] = {}
        self._lost: list[Made] = []
        """Of the state that was restored; they are to be made again."""
        self._places: weakref.WeakKeyDictionary[DataLoader[Any], tuple[str, int]] = (
            weakref.WeakKeyDictionary()
        )
        """Loader -> its place, and of how many objects it was looked for in."""
        self._told = False
        """That persistent workers are not."""
        self._making = False
        self._others = 0

    def install(self) -> None:
        """From here on all loaders of this process are these."""
        torch_private.make_iterators_by(self._make, self._begin)

    def begin_step(self, step: int) -> None:
        self.step, self._count, self._others = step, 0, 0

    def state(self) -> list[list[Any]]:
        """(between steps) Those that are under way, in the order in which they were made."""
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
        """(before objects load their states) What was under way is gone, and will be made again."""
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
        # What it was called by its class.
        iterator._next_data = _Batches(type(iterator)._next_data, weakref.ref(iterator), seed)
        self._live[made] = weakref.ref(iterator), weakref.ref(loader)
        return iterator

    def _begin(self, iterator: Any, loader: DataLoader[Any], begin: Any) -> None:
        """One that a class of another package makes (torchdata's StatefulDataLoader) begins with a seed for its
        workers, which its state may have: it is not drawn from the default generator, which is each replica's own."""
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
        if loader.num_workers:  # what its workers draw is in no state, so that loading one is to be seen
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
        # One that is not registered, or was not yet when it was made, has no place.
        lost = lost or next((made for made in same if not (made.place and place)), None)
        # One may be made at another place, if none is where it was.
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
    """In the place of an iterator's way to its next batch."""

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
    """Where a registered object has it (``data.loader``); empty: nowhere that one would look. It is the same for the
    loaders of all data-parallel ranks (`session.loader`)."""
    return next((path for path, value in _walk(objects) if value is loader), "")


def has_loader(place: str, objects: Mapping[str, Any]) -> bool:
    """There is one."""
    return any(path == place and isinstance(value, DataLoader) for path, value in _walk(objects))


def _walk(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is below registered objects, by paths; what has two of them twice."""
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
    """Its ``__dict__``; a ``__getattr__`` of its class is not asked."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _kind(loader: DataLoader[Any]) -> str:
    sampler = loader.batch_sampler if loader.sampler is None else loader.sampler
    return f"{type(loader.dataset).__qualname__}/{type(sampler).__qualname__}/{loader.batch_size}"
