"""QuietSelector: whether an event loop has caught up with what has come.

A lease must not run out while the heartbeat that renews it lies unread. A loop that has waited for a while, with
nothing to do, had read everything before; one that was never idle may be behind, by any time. So may one on a machine
with too much to do: what looks like waiting for a message is waiting for a processor then, which Linux counts.
"""

import selectors
import time
from pathlib import Path

QUIET_S = 0.002
"""Longer than it takes a thread of gRPC to hand over what it has read."""
BUSY = 0.9
"""Part of the time in which a thread ran, or waited for a processor: it was never idle for long."""
_SCHEDULED = Path("/proc/thread-self/schedstat")


class QuietSelector(selectors.DefaultSelector):
    """(the loop's thread) `asyncio.SelectorEventLoop(QuietSelector())`; nothing of the loop is touched."""

    def __init__(self) -> None:
        super().__init__()
        self._was_quiet = True
        self._asked_at, self._ready_s = time.monotonic(), _ready_s()

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
        before_at, before_s = self._asked_at, self._ready_s
        self._asked_at, self._ready_s = time.monotonic(), _ready_s()
        return was_quiet and self._ready_s - before_s <= BUSY * (self._asked_at - before_at)


def _ready_s() -> float:
    """How long this thread has run or waited for a processor, ever; 0 where the kernel does not say."""
    try:
        return sum(map(int, _SCHEDULED.read_text().split()[:2])) * 1e-9
    except (OSError, ValueError):
        return 0.0
