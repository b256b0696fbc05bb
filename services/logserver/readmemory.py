"""What all readers together may take to read ahead. The first get as much as they can use, many get less each."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from swift.log.assembly import MESSAGE_BYTES

BUDGET_BYTES = 64 << 20
"""Of messages. A reader that does not take its answers holds five times its message: it is read ahead, on its way."""
LEAST_BYTES = 64 << 10
"""That anybody gets, also when nothing is left."""
_PART = 16


class ReadMemory:
    """Thread-safe."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._left = budget_bytes
        self._lock = threading.Lock()

    @contextmanager
    def message_bytes(self) -> Iterator[int]:
        """For one reader, as long as it reads: how large its messages may be. Each takes a part of what is left, so
        there is always some left for the next one."""
        with self._lock:
            mine = min(MESSAGE_BYTES, self._left // _PART)
            self._left -= mine
        try:
            yield max(mine, LEAST_BYTES)
        finally:
            with self._lock:
                self._left += mine
