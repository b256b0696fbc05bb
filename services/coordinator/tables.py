"""Table: a dict that knows which of its entries have changed."""

from collections.abc import Iterable, Mapping
from typing import NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Table(dict[K, V]):
    """Entries are replaced, never changed in place: what is in here is immutable, or treated so."""

    __slots__ = ("changed",)

    def __init__(self, entries: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        super().__init__(entries)
        self.changed: set[K] = set(self)
        """Keys that were set or deleted since somebody has last emptied this set."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.changed.add(key)

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        self.changed.add(key)

    def pop(self, key: K, *default: V) -> V:  # type: ignore[override]
        value = super().pop(key, *default)
        self.changed.add(key)
        return value

    def setdefault(self, key: K, default: V) -> V:
        if key not in self:
            self[key] = default
        return self[key]

    def _unsupported(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("set and delete entries one by one, or put another Table in the place of this one")

    clear = update = popitem = __ior__ = _unsupported
