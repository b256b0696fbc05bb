"""What the disk has left, asked of the system: the alarms follow it."""

import time
from collections.abc import Callable

from services.logserver.state import ServerState
from swift import events


class DiskWatch:
    """(without the server's lock; any thread)"""

    def __init__(
        self, state: ServerState, free_bytes: Callable[[], int | None], clock: Callable[[], float]
    ) -> None:
        self.free_bytes = free_bytes
        self._state = state
        self._clock = clock

    def look(self) -> None:
        """Alarms begin and end by what the disk has left."""
        free = self.free_bytes()
        with self._state.changed:
            news = self._state.look_at_disk(free, self._clock())
        for notice in news:
            events.emit(notice.event, **notice.fields)

    def files_removed(self) -> None:
        """There may be room again: no reason to wait any longer."""
        with self._state.changed:
            self._state.space.files_removed(self._clock())
        self.look()


_REST_S = 0.0002


def rest(seconds: float | None = None) -> None:
    """(without the server's lock) Between two pieces of a long piece of work: who waits for the lock gets it.
    (One that is taken again at once goes to whoever has just given it back.)"""
    time.sleep(_REST_S if seconds is None else seconds)
