"""QuietSelector: whether an event loop has caught up with what has come.

A lease must not run out while the heartbeat that renews it lies unread. A loop that has waited for a while, with
nothing to do, had read everything before; one that was never idle may be behind, by any time.
"""

import selectors
import time

QUIET_S = 0.002
"""Longer than it takes a thread of gRPC to hand over what it has read."""


class QuietSelector(selectors.DefaultSelector):
    """(the loop's thread) `asyncio.SelectorEventLoop(QuietSelector())`; nothing of the loop is touched."""

    def __init__(self) -> None:
        super().__init__()
        self._was_quiet = True

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        began = time.monotonic()
        found = super().select(timeout)
        self._was_quiet = self._was_quiet or time.monotonic() - began >= QUIET_S
        return found

    def caught_up(self) -> bool:
        """Whether it has been so since this was asked last."""
        was_quiet, self._was_quiet = self._was_quiet, False
        return was_quiet
