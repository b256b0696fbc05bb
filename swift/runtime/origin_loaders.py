"""Data loaders of more than one data-parallel rank (*origin*) in one process, at one position.

What a trainer registers has the same state on all replicas (`swift.runtime.audit`). So a loader that was made for
another origin gives that one's next batch, once it has this rank's state (`TrainerState.draw_as_other`). Where only the
ranks of its own pipeline can make it, its batches are fetched from one of them (`swift.runtime.fetched_batches`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from swift.errors import UsageError
from swift.runtime.draws import Draw, Drawn, Draws, Given, digest, packed

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
    _draws: Draws | None
    _set: dict[str, Any]
    """By the trainer, at this rank's own."""

    def __init__(self, make: Make, own: int, origin: Callable[[], int], *, fetches: bool = False) -> None:
        """`fetches`: the loader of another origin is not made. What it would give is fetched. Raises UsageError for
        a loader without a state."""
        parts = {
            "_make": make,
            "_own": own,
            "_origin": origin,
            "_made": {own: make(own)},
            "_draws": Draws() if fetches else None,
            "_set": {},
        }
        vars(self).update(parts)  # `__setattr__` sets what is the loader's
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(self._made[own], method, None)):
                raise UsageError(
                    f"session.loader was given what makes a {type(self._made[own]).__name__} without {method}(); a "
                    "recovery must be able to take it back, so give it state_dict and load_state_dict"
                )

    @property
    def present(self) -> Any:
        """The loader of the origin whose batch is computed; where it is not made here, this rank's own."""
        return self._made[self._own if self._draws is not None else self._origin()]

    @property
    def own(self) -> Any:
        """The loader of this rank's own data-parallel rank."""
        return self._made[self._own]

    @property
    def made(self) -> Mapping[int, Any]:
        """By origin."""
        return self._made

    @property
    def draws(self) -> Draws | None:
        """Of a loader whose batches are fetched."""
        return self._draws

    def begin(self, origin: int) -> None:
        """A step is computed for this origin. Its loader has a state of its own until it is given this rank's."""
        if origin == self._own:
            return
        if self._draws is not None:
            self._draws.begin(origin)
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
        value = getattr(self.present, name)
        if self._draws is None:
            return value
        if callable(value):
            return lambda *args, **kwargs: self._drawn(name, lambda: value(*args, **kwargs))
        return self._drawn(name, lambda: value)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._origin() == self._own:
            setattr(self._made[self._own], name, value)
            self._set[name] = value
        elif self._draws is None:
            setattr(self.present, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._drawn("call", lambda: self.present(*args, **kwargs))

    def __getitem__(self, index: Any) -> Any:
        return self._drawn("item", lambda: self.present[index])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.present) if self._draws is None else self._drawn_in_turn()

    def __next__(self) -> Any:
        return self._drawn("next", lambda: next(self.present))

    def __len__(self) -> int:
        return len(self.present)

    def _drawn(self, what: str, give: Callable[[], Given]) -> Given:
        if self._draws is None:
            return give()
        origin = self._origin()
        return self._draws.given(what, origin) if origin != self._own else self._draws.noted(what, give)

    def _drawn_in_turn(self) -> Iterator[Any]:
        batches: Iterator[Any] | None = None

        def following() -> Any:
            nonlocal batches
            if batches is None:  # only for a batch of its own: it may begin an epoch, or start workers
                batches = iter(self.present)
            return next(batches)

        while True:
            try:
                batch = self._drawn("iter", following)
            except StopIteration:
                return
            yield batch


class OriginLoaders:
    """All of a session."""

    def __init__(self) -> None:
        self._loaders: list[OriginLoader] = []
        self.names: list[str] = []
        """By which the states of those are registered that are made for others."""

    def add(self, loader: OriginLoader, name: str) -> None:
        self._loaders.append(loader)
        if loader.draws is None:
            self.names.append(name)

    def begin(self, origin: int) -> None:
        for loader in self._loaders:
            loader.begin(origin)

    @contextmanager
    def writing(self) -> Iterator[list[list[bytes]]]:
        """What this rank's own loaders give in here, of each that is not made for others."""
        written: list[list[bytes]] = []
        for draws in self._fetching():
            draws.written = []
            written.append(draws.written)
        try:
            yield written
        finally:
            for draws in self._fetching():
                draws.written = None

    def position(self) -> bytes:
        """A digest of the states of those that are not made for others."""
        states = [loader.state_dict() for loader in self._loaders if loader.draws is not None]
        return digest([[packed(Draw("state", state))] for state in states])

    def take(self, origin: int, drawn: Drawn) -> None:
        """What `writing` has yielded at a rank of this origin. Raises UsageError if it has other loaders than this."""
        own = list(self._fetching())
        if len(own) != len(drawn):
            raise UsageError(
                f"this rank has made {len(own)} loaders with session.loader, and one of data-parallel rank {origin} "
                f"{len(drawn)}: with fetch_batches=True all ranks make the same ones"
            )
        for draws, of_one in zip(own, drawn, strict=True):
            draws.take(origin, of_one)

    def _fetching(self) -> Iterator[Draws]:
        return (loader.draws for loader in self._loaders if loader.draws is not None)
