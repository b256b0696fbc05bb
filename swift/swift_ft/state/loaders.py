"""Data loaders of more than one data-parallel rank (*origin*) in one process, at one position.

A registered object has the same state on all replicas (`swift_ft.train.verification`). So a loader that was created for
another origin gives that origin's next batch, once it has this rank's state (`TrainerState.draw_as_other`).
"""

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from swift_ft import torch_private
from swift_ft.errors import ServiceError, UsageError
from swift_ft.state.digests import Digest, digest_of, digest_there, read
from swift_ft.state.rng import Randomness, calls_of_generator, kept, seed_all, seed_for
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
        self._warned_of_workers = False
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
        if loader.generator is not None or self._making:
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

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """(a registered loader's) Iterators that are created meanwhile draw as they are."""
        before, self._making = self._making, True
        try:
            yield
        finally:
            self._making = before

    def _start_workers_anew(self, loader: DataLoader[Any]) -> None:
        torch_private.start_workers_anew(loader)
        if not self._warned_of_workers:
            self._warned_of_workers = True
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


# Registered loaders, exactly repeatable.
#
# A loader of batches (torch's DataLoader, torchdata's StatefulDataLoader, a streaming dataset) hands out iterators, and
# a trainer keeps them in variables of its own. Its `load_state_dict`, if it has one, holds for the next iterator only;
# its state may differ between replicas (a data-parallel rank reads its own shards); and it may leave something out (a
# shuffle buffer, what workers draw, what was read ahead). So a registered loader's iterators are the session's: they go
# on behind whatever the loader is put back to. What a recovery needs is
#
#     a place      the iteration (each `iter(loader)` counts) and the batches given in it: the same on all replicas
#     a base       this rank's own: the loader's state when the iteration began, and one on the way with digests of the
#                  batches behind it; if they are not given again, the iteration is drawn from its beginning
#     a dropped step's batches, which are given again
#
# A place behind the base is reached by drawing. Iterations and batches are drawn by seeds that follow from the place.
#
#     (session) ``RegisteredLoader`` … ``begin_step`` … ``drop_step``; (state) ``place``, ``state_dict``,
#     ``load_state_dict``

_ENDED = object()
_COMPARED = 3
"""Batches behind a state by which it is known to be whole."""


def is_loader(value: Any) -> bool:
    return isinstance(value, DataLoader | IterableDataset)


class Place(NamedTuple):
    iteration: int = 0
    """0: none has begun."""
    given: int = 0
    ended: bool = False


class _Snapshot(NamedTuple):
    given: int
    own: Any
    following: list[str]
    """Digests of the batches behind it."""


class _Base(NamedTuple):
    """What of a loader this rank has kept of an iteration."""

    iteration: int
    epochs: Mapping[str, int]
    snapshots: tuple[_Snapshot, ...]
    """The first one is of the iteration's beginning."""
    generators: Mapping[str, Any]
    """States of generators in the loader, its samplers and its dataset then: they go on over iterations."""


class RegisteredLoader:
    """Stands in for a loader among the registered objects, and for the `__iter__` of the loader itself."""

    def __init__(
        self, loader: Any, number: int, iterators: "Iterators", earlier: Callable[[], Iterator[Any]]
    ) -> None:
        """`number`: among the registered loaders. `earlier`: yields the states of this loader in this rank's
        checkpoints, the newest first. Raises UsageError for a loader that has begun."""
        if getattr(loader, "_iterator", None) is not None:
            raise UsageError(
                f"the {type(loader).__name__} was iterated over, or asked for its state, before it was registered; "
                "call session.register(loader=...) first: its iterators are the session's then"
            )
        self.loader = loader
        self._number = number
        self._iterators = iterators
        self._earlier = earlier
        self._at = Place()
        self._epochs: dict[str, int] = {}
        """Epochs of samplers and datasets (`set_epoch`) when the iteration began."""
        self._inner: Iterator[Any] | None = None
        self._broken = False
        self._passed: _Base | None = None
        """(while it goes to a place) Of the iteration that began last on the way."""
        self._handed: weakref.ref[_Handed] | None = None
        """The trainer's iterator of this iteration."""
        self._continues = False
        """Set in a process that has no iterator yet, if the state's trainer had one."""
        self._base: _Base | None = None
        self._first: Any = None
        """A dataset's state as the script has made it."""
        self._before: tuple[Place, dict[str, int], _Base | None] = self._at, self._epochs, None
        self._since: list[Any] = []
        """What the step has got so far: a `_Base` where an iteration began, batches, `_ENDED`."""
        self._again = deque[Any]()
        kind: Any = type(loader)
        self._iter = kind.__iter__

        def reduce(loader: Any, protocol: Any) -> Any:
            """Pickles it as what it was: a spawned worker gets it, and knows no session."""
            function, arguments, *rest = kind.__reduce_ex__(loader, protocol)
            given = [kind if each is type(loader) else each for each in (function, *arguments)]
            return (_call, tuple(given), *rest)

        mine = {"__iter__": lambda _loader: self.iterate(), "__reduce_ex__": reduce}
        try:
            loader.__class__ = type(kind.__name__, (kind,), {**mine, "__module__": kind.__module__})
        except AttributeError:  # Accelerate's passes itself off as another class
            raise UsageError(
                f"register(...) was given a {kind.__name__}, which stands in for another loader and reads ahead of it; "
                "register that one, and iterate over it (Accelerate's: loader.base_dataloader)"
            ) from None

    # --- the trainer's ---

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def iterate(self) -> Iterator[Any]:
        if torch.utils.data.get_worker_info() is not None:
            return iter(self._iter(self.loader))
        handed = _Handed(self)
        if self._continues:
            self._continues = False
            handed.continues = True
        elif self._again and isinstance(self._again[0], _Base):
            self._repeat()
        else:
            self._again.clear()
            self._begin_iteration()
        self._handed = weakref.ref(handed)
        return handed

    def draw(self, handed: "_Handed") -> Any:
        if handed is not (self._handed and self._handed()):
            raise UsageError(
                "a registered loader has one iterator at a time, and a newer one was made; register two loaders"
            )
        if self._again and isinstance(self._again[0], _Base):
            self._repeat()  # the trainer holds that iteration's iterator from the dropped step
        if self._again:
            batch = self._repeat()
        else:
            if not self._at.iteration:  # put back to before the first one, which this iterator began
                self._begin_iteration()
            batch = self._draw()
            self._since.append(batch if batch is _ENDED else _Kept(batch))
            self._compare_by(batch)
        if batch is not _ENDED:
            return batch
        if not handed.continues:
            raise StopIteration
        # The trainer that went on was at the end: it would have asked for the next iteration.
        handed.continues = False
        self._begin_iteration()
        return self.draw(handed)

    def _begin_iteration(self) -> None:
        epochs = {path: thing.epoch for path, thing in self._counters()}
        if self._base is None or self._base.iteration != self._at.iteration + 1:
            self._base = self._base_at(self._at.iteration + 1)
        self._base = self._base._replace(epochs=epochs)
        self._next_iteration()
        self._epochs = epochs
        self._since.append(self._base)

    def _repeat(self) -> Any:
        """Gives again what the dropped step has got."""
        event = self._again.popleft()
        self._since.append(event)
        if isinstance(event, _Base):
            self._at, self._base, self._epochs = Place(event.iteration), event, dict(event.epochs)
        elif event is _ENDED:
            self._at = self._at._replace(ended=True)
        else:
            self._at = self._at._replace(given=self._at.given + 1)
            return event.batch()
        return event

    # --- the loader's ---

    def _next_iteration(self) -> None:
        if getattr(self.loader, "_starting_state_dict", None) is not None:
            # A dataset of `datasets` begins each iteration at the state that was loaded last, not the next one alone.
            self.loader._starting_state_dict = None
        self._at = Place(self._at.iteration + 1)
        self._inner = self._open()

    def _open(self) -> Iterator[Any]:
        with self._drawing(0):
            return iter(self._iter(self.loader))

    def _draw(self) -> Any:
        if self._at.ended or self._inner is None:
            return _ENDED
        with self._drawing(self._at.given + 1):
            try:
                batch = next(self._inner)
            except StopIteration:
                self._at = self._at._replace(ended=True)
                return _ENDED
            except Exception:  # a worker was killed, say; such an iterator gives nothing more
                self._broken = True
                raise
        self._at = self._at._replace(given=self._at.given + 1)
        return batch

    def _base_at(self, iteration: int) -> _Base:
        """Returns that of an iteration that has not begun. It begins as the first one did: a loader makes a new
        iterator of an empty state, a dataset has to be put back."""
        if not isinstance(self.loader, DataLoader):
            own = self._first = self._own() if self._first is None else self._first
        else:
            own = {} if iteration > 1 and hasattr(self.loader, "state_dict") else self._own()
        generators = {path: get_state() for path, get_state, _ in self._generators()}
        return _Base(iteration, {}, (_Snapshot(0, own, []),), generators)

    def _own(self) -> Any:
        """Returns a copy of the loader's state, None if it has none."""
        if not hasattr(self.loader, "state_dict"):
            return None
        with self._drawing(0):
            return copy.deepcopy(self.loader.state_dict())

    @contextmanager
    def _drawing(self, number: int) -> Iterator[None]:
        seed = self._iterators.randomness.iterator(BEFORE_RUN, max(1, self._at.iteration))
        with kept(), self._iterators.left_alone():
            seed_all(seed_for(seed, number, self._number, 0))
            yield

    def _counters(self) -> Iterator[tuple[str, Any]]:
        """Yields what has `set_epoch` and `epoch`: the loader, its samplers and its dataset."""
        for path, thing in self._parts():
            if callable(getattr(thing, "set_epoch", None)) and isinstance(getattr(thing, "epoch", None), int):
                yield path, thing

    def _generators(self) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
        """Yields the path of each, and what gets and sets its state."""
        for path, thing in self._parts():
            for name, value in _attributes(thing).items():
                if (calls := calls_of_generator(value)) is not None:
                    yield f"{path}.{name}", *calls

    def _has_own_sampler(self) -> bool:
        """Returns whether a sampler is not torch's: it may keep anything from one iteration to the next."""
        samplers = [thing for path, thing in self._parts() if "sampler" in path]
        return any(type(each).__module__.split(".")[0] not in ("torch", "builtins") for each in samplers)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for path in ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset"):
            thing = self.loader
            for name in filter(None, path.split(".")):
                thing = getattr(thing, name, None)
            yield path, thing

    def _set_epochs(self, epochs: Mapping[str, int]) -> None:
        for path, thing in self._counters():
            if path in epochs and thing.epoch != epochs[path]:
                thing.set_epoch(epochs[path])

    # --- the step's, and the state's ---

    def begin_step(self) -> None:
        self._since = []
        self._before = self._at, self._epochs, self._base

    def drop_step(self) -> None:
        """Goes back to the step's start: its batches are given again, unless the step has changed them in place."""
        self._at, self._epochs, self._base = self._before
        unchanged = all(event.unchanged for event in self._since if isinstance(event, _Kept))
        if unchanged and not self._broken:
            self._again.extendleft(reversed(self._since))
        else:
            self._go(self._at, self._epochs)
        self._since = []

    def place(self) -> dict[str, Any]:
        """Returns what is the same on all replicas."""
        return {"place": list(self._at), "epochs": self._epochs}

    def shared_state(self) -> dict[str, Any]:
        """Returns the state for a replica, which draws from a base of its own."""
        held = not self._at.ended and (self._continues or (self._handed and self._handed()) is not None)
        return {**self.place(), "held": held}

    def state_dict(self) -> dict[str, Any]:
        base = self._base or self._base_at(1)
        first, *others = base.snapshots
        if self._at.given and not self._at.ended and not self._again:
            known = [snapshot for snapshot in others if snapshot.following][-1:]
            if not others or others[-1].given != self._at.given:
                others = [*known, _Snapshot(self._at.given, self._own(), [])]
        self._base = base = base._replace(snapshots=(first, *others))
        told = {
            **base._asdict(),
            "snapshots": [list(each) for each in base.snapshots if each is first or each.following],
            "of": self._iterators.randomness.dp_rank,
        }
        return {**self.shared_state(), "base": told}

    def _compare_by(self, batch: Any) -> None:
        for given, _, following in self._base.snapshots if self._base and batch is not _ENDED else ():
            due = len(following) < _COMPARED and self._at.given == given + len(following) + 1
            if due and (told := _digest_of_batch(batch)) is not None:
                following.append(told)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the state's place, from its base, or from one of this rank's checkpoints. Raises ServiceError."""
        at = Place(*state["place"])
        if not isinstance(self.loader, DataLoader) and self._first is None:
            self._first = self._own()
        self._base = self._base_for(at, [state] if "base" in state else self._earlier())
        self._continues = bool(state["held"]) and (self._handed and self._handed()) is None
        self._go(at, dict(state["epochs"]))

    def _base_for(self, at: Place, states: Iterable[Any]) -> _Base:
        for base in (state["base"] for state in states):
            if base["iteration"] <= max(1, at.iteration) and base["of"] == self._iterators.randomness.dp_rank:
                snapshots = tuple(
                    _Snapshot(given, own, list(following)) for given, own, following in base["snapshots"]
                )
                return _Base(base["iteration"], base["epochs"], snapshots, base["generators"])
        base = self._base or self._base_at(1)
        if base.iteration > max(1, at.iteration):
            raise ServiceError("no checkpoint of this rank has an earlier state of the loader")
        return base

    def _go(self, at: Place, epochs: dict[str, int]) -> None:
        """Draws from the base to this place."""
        assert self._base is not None, "a checkpoint comes before the first step"
        self._again.clear()
        self._since, self._broken, self._passed = [], False, None
        base = self._base
        on_the_way = base.snapshots[1:] if base.iteration == at.iteration else ()
        on_the_way = tuple(each for each in on_the_way if each.following and each.given < at.given)
        for given, own, following in (*reversed(on_the_way), base.snapshots[0]):
            if self._reaches(at, epochs, given, own, following):
                break
        else:
            raise ServiceError(
                f"the loader does not give again what it has given in iteration {at.iteration}: its batches are to "
                "follow from the number of the epoch (a generator that is seeded by it, a sampler with set_epoch)"
            )
        self._epochs = epochs
        if base.iteration == max(1, at.iteration):
            self._base = base._replace(snapshots=(base.snapshots[0], *on_the_way))
        else:
            self._base = (self._passed or self._base_at(at.iteration))._replace(epochs=epochs)

    def _reaches(self, at: Place, epochs: dict[str, int], given: int, own: Any, following: list[str]) -> bool:
        assert self._base is not None
        first = self._base.iteration
        if own is not None:
            self.loader.load_state_dict(copy.deepcopy(own))
        elif at.iteration and not self._base.generators and not self._has_own_sampler():
            first = at.iteration  # such an iteration follows from its number alone
        for path, _, set_state in self._generators() if not given else ():
            if path in self._base.generators:  # one that a sampler makes when it begins came later
                set_state(self._base.generators[path])
        self._at, self._inner = Place(min(first, at.iteration), given), None
        self._set_epochs(epochs if first == at.iteration else self._base.epochs)
        if not at.iteration:
            return True
        self._inner = self._open()
        due = following[: at.given - given] if first == at.iteration else following
        for told in due if first == self._base.iteration else ():
            if (batch := self._draw()) is _ENDED or _digest_of_batch(batch) != told:
                return False
        while self._at.iteration < at.iteration:
            while self._draw() is not _ENDED:
                pass
            self._set_epochs(epochs)
            self._passed = self._base_at(self._at.iteration + 1)
            self._next_iteration()
        while self._at.given < at.given and self._draw() is not _ENDED:
            pass
        if at.ended and not self._at.ended:
            self._draw()
        return self._at == at


def _digest_of_batch(batch: Any) -> str | None:
    """Returns a digest of the batch, None if it holds what cannot be compared."""
    try:
        return digest_of(batch).hex()
    except UsageError:
        return None


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class _Handed:
    """An iterator that the trainer holds. It stays valid when the loader goes back."""

    def __init__(self, of: RegisteredLoader) -> None:
        self._of = of
        self.continues = False

    def __iter__(self) -> "_Handed":
        return self

    def __next__(self) -> Any:
        return self._of.draw(self)


class _Kept:
    """A batch of the step, to be given again."""

    def __init__(self, batch: Any) -> None:
        leaves, self._form = tree_flatten(batch)
        self._leaves = [leaf if _is_tracked(leaf) else copy.deepcopy(leaf) for leaf in leaves]
        self._seen = self._versions_and_digests()

    @property
    def unchanged(self) -> bool:
        """False once a tensor was changed in place: by its version, or by its bits, which numpy and ``.data`` change
        without one."""
        (versions, found), (versions_before, found_before) = self._versions_and_digests(), self._seen
        return versions == versions_before and read(found) == read(found_before)

    def _versions_and_digests(self) -> tuple[list[int], list[Digest]]:
        tracked = [leaf for leaf in self._leaves if _is_tracked(leaf)]
        return [leaf._version for leaf in tracked], [digest_there(leaf) for leaf in tracked]

    def batch(self) -> Any:
        leaves = [leaf if _is_tracked(leaf) else copy.deepcopy(leaf) for leaf in self._leaves]
        return tree_unflatten(leaves, self._form)


def _is_tracked(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_inference()
