"""What watchers are shown of each job: its View, as it was durable at some moment not long ago."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable

from services.coordinator.messages_text import waiting_for
from services.coordinator.row import JobRow
from services.coordinator.views import view_of
from swift._pb import coordinator_pb2 as pb

SOON_S = 0.05
"""How long what is new is not shown, if the state is as it was: n ranks that join are not n Views for each."""
TOLD_PER_S = 1024
"""... and longer, if so many watchers would be told of it in a second."""
SHOWN_S = 5.0
"""How long a View may name a rank as waited for that has reported, or is ready: to show each at once would wake all."""


class Published:
    """The Views of all jobs. On the driver's loop alone."""

    def __init__(self, clock: Callable[[], float], soon: Callable[[str], None]) -> None:
        """`soon`: has the job of that name shown, as it is durable."""
        self._clock = clock
        self._soon = soon
        self._views: dict[str, pb.View] = {}
        self._shown_at: dict[str, float] = {}
        self._unshown: set[str] = set()
        """Jobs of which there is something new, that will be shown soon."""
        self._watchers: dict[str, set[asyncio.Event]] = {}

    def publish(self, row: JobRow) -> None:
        """Another state or generation is shown at once; the rest a little later, with whatever has come by then."""
        shown = self._views.get(row.job)
        if shown is None or (row.generation, pb.State.Value(row.state)) != (shown.generation, shown.state):
            self.show(row)
        elif row.job not in self._unshown:
            self._unshown.add(row.job)
            watchers = len(self._watchers.get(row.job, ()))
            asyncio.get_running_loop().call_later(max(SOON_S, watchers / TOLD_PER_S), self._if_due, row.job)

    def _if_due(self, name: str) -> None:
        if name in self._unshown:
            self._soon(name)

    def show(self, row: JobRow) -> None:
        """The View is made, and all that watch the job look at it."""
        self._unshown.discard(row.job)
        self._views[row.job] = view_of(row)
        self._shown_at[row.job] = self._clock()
        self.wake(row.job)

    def wake(self, name: str) -> None:
        for changed in self._watchers.get(name, ()):
            changed.set()

    def wake_all(self) -> None:
        for name in self._watchers:
            self.wake(name)

    def is_outdated(self, row: JobRow) -> bool:
        """It has named others as waited for, for some time."""
        at = self._shown_at.get(row.job, -math.inf)
        return self._clock() - at >= SHOWN_S and self._views[row.job].waiting_for != waiting_for(row)

    async def views(self, name: str, over: Callable[[], bool]) -> AsyncGenerator[pb.View, None]:
        """The published View at once, then newer ones, until it is over; a slow reader skips to the newest."""
        changed = asyncio.Event()
        self._watchers.setdefault(name, set()).add(changed)
        try:
            changed.set()
            while not over():
                await changed.wait()
                changed.clear()
                view = self._views.get(name)
                if view is not None:
                    yield view
        finally:
            self._watchers[name].discard(changed)
            if not self._watchers[name]:
                del self._watchers[name]
