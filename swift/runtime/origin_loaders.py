"""Data loaders of more than one data-parallel rank (*origin*) in one process, at one position.

What a trainer registers has the same state on all replicas (`swift.runtime.audit`). So a loader that was made for
another origin gives that one's next batch, once it has this rank's state.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from swift.errors import UsageError

Make = Callable[[int], Any]


class OriginLoader:
    """A loader for each origin that is asked for, as one object; see `Session.loader`.

    All but its state is that of the loader of the origin whose batch is computed; its state is that of this rank's own.
    """

    def __init__(self, make: Make, own: int, origin: Callable[[], int]) -> None:
        self._make = make
        self._own = own
        self._origin = origin
        self._made: dict[int, Any] = {own: make(own)}
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

    def begin(self, origin: int) -> None:
        """A step is computed for this origin."""
        if origin == self._own:
            return
        if origin not in self._made:
            self._made[origin] = self._make(origin)
        self._made[origin].load_state_dict(copy.deepcopy(self.state_dict()))

    def state_dict(self) -> Any:
        return self._made[self._own].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._made[self._own].load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of this object, and not there yet
            raise AttributeError(name)
        return getattr(self.present, name)

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

    def add(self, loader: OriginLoader) -> None:
        self._loaders.append(loader)

    def begin(self, origin: int) -> None:
        for loader in self._loaders:
            loader.begin(origin)
