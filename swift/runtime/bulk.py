"""One digest of all that a long container has, at the speed of pickle's C code: numbers, strings and containers of them
are written by it, and what stands for everything else is asked for.

Nothing is kept of what is written, and nothing is ever read from it.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import xxhash

_BYTES_MAX = 8 << 20
_OBJECTS_MAX = 5_000
"""Of a container with more than that, the beginning is told, and of the rest which things there are."""


class _Enough(Exception):
    pass


class _Sink(io.RawIOBase):
    """What is written there is only counted and hashed."""

    def __init__(self) -> None:
        self.hash = xxhash.xxh3_64()
        self._bytes = 0

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self._bytes += len(data)
        if self._bytes > _BYTES_MAX:
            raise _Enough
        return len(data)


def _stands_for(*_: Any) -> None:
    """(in the pickle) An object."""


class _Pickler(pickle.Pickler):
    def __init__(self, sink: _Sink, stands_for: Callable[[Any], Any]) -> None:
        super().__init__(sink, protocol=5)
        self.fast = True  # by value: which strings are one object does not count
        self._stands_for = stands_for
        self._objects = 0

    def reducer_override(self, value: Any) -> Any:
        if value is _stands_for:
            return NotImplemented
        self._objects += 1
        if self._objects > _OBJECTS_MAX:
            raise _Enough
        return _stands_for, (type(value).__qualname__, self._stands_for(value))


def digest(container: Any, stands_for: Callable[[Any], Any]) -> int:
    """`stands_for(object)`: numbers, strings, containers and objects that tell whether it has changed."""
    sink = _Sink()
    parts = [list(container)]
    if hasattr(container, "values"):
        parts.append(list(container.values()))
    try:
        _Pickler(sink, stands_for).dump(parts)
    except Exception:  # noqa: BLE001  (enough, or a thing that holds itself: what is hashed so far, and which there are)
        for items in parts:
            sink.hash.update(_which(items))
    return sink.hash.intdigest()


def _which(items: list[Any]) -> bytes:
    """Numbers and strings count by their value, what else there is by which object it is."""
    try:
        return repr(hash(tuple(items))).encode()
    except TypeError:
        return repr(hash(tuple(map(id, items)))).encode()
