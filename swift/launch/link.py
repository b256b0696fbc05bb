"""The launcher's link to the coordinator: notices out, Views in, and neither ever delays a replacement.

(main thread)  `notify_exit`, `fail`: queued, sent in order by the link's own thread, which may wait for a
               coordinator that is being restarted.
(watch thread) every new View is kept in `view` and wakes the main loop.
"""

import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from swift._pb import coordinator_pb2 as pb
from swift.errors import SwiftError

if TYPE_CHECKING:
    from swift.control.client import CoordinatorClient


DRAIN_S = 5.0
"""How long the end of the launcher waits for the last notices to be sent."""


class CoordinatorLink:
    """Opened at the start of the launcher, closed at its end."""

    def __init__(self, address: str, job: str, wake: Callable[[], None]) -> None:
        self._address = address
        self._job = job
        self._wake = wake
        self._calls: queue.SimpleQueue[Callable[[CoordinatorClient], object] | None] = queue.SimpleQueue()
        self.view: pb.View | None = None
        """The newest View; None until the coordinator has sent one."""
        self._thread = threading.Thread(target=self._run, name="coordinator-link", daemon=True)
        self._thread.start()

    def notify_exit(self, rank: int, pid: int, exit_code: int, incarnation: str) -> None:
        """A child has exited."""
        self._calls.put(lambda client: client.member_exited(rank, pid, exit_code, incarnation))

    def fail(self, reason: str) -> None:
        """The job cannot go on."""
        self._calls.put(lambda client: client.fail(reason))

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Sends what is queued, as far as that works within the time."""
        self._calls.put(None)
        self._thread.join(drain_s)

    def _run(self) -> None:
        # Imported here, beside the main thread: grpc takes a while.
        from swift.control.client import CoordinatorClient

        client = CoordinatorClient(self._address, self._job)
        client.watch(self._on_view)
        while (call := self._calls.get()) is not None:
            try:
                call(client)
            except SwiftError as error:
                print(f"swift: coordinator {self._address}: {error}", file=sys.stderr)
        client.close()

    def _on_view(self, view: pb.View) -> None:
        self.view = view
        self._wake()
