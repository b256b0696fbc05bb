"""The launcher's link to the coordinator: sends notices, receives Views, and never delays a replacement.

(main thread)  `notify`, `fail`: queued, sent in order by the link's own thread, each of them again and again
               until the coordinator answers: without it, a death is noticed only when the lease ends.
(watch thread) every new View is kept in `view` and wakes the main loop.
"""

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import SwiftError
from swift_ft.text import tell

if TYPE_CHECKING:
    from swift_ft.coordinator_client import CoordinatorClient


DRAIN_S = 5.0
"""Seconds for which a launcher that ends waits until the coordinator has the news of the job's failure."""
ASK_S = 3.0
"""Seconds for which a launcher that leaves asks for a checkpoint."""
DRAIN_UNSEEN_S = 3.0
"""Seconds as above, if the coordinator has never answered: there may be none, or no such job."""


class CoordinatorLink:
    def __init__(self, address: str, job: str, wake: Callable[[], None]) -> None:
        self._address = address
        self._job = job
        self._wake = wake
        self._calls: queue.SimpleQueue[Callable[[CoordinatorClient], object] | None] = queue.SimpleQueue()
        self._enqueued = 0
        self._answered = 0
        self._must_drain = False
        self._closing = False
        self.view: pb.View | None = None
        """The newest View; None until the job is known to the coordinator."""
        self.not_asked = False
        self._thread = threading.Thread(target=self._run, name="coordinator-link", daemon=True)
        self._thread.start()

    def notify(self, request: "pb.ExitRequest | pb.RehearsedRequest") -> None:
        """Reports the exit or the rehearsal of a rank, or the state of its place."""
        self._enqueue(lambda client: client.call(request))

    def fail(self, reason: str) -> None:
        """Reports that the job cannot go on. `close` waits until this is delivered."""
        self._must_drain = True
        self._enqueue(lambda client: client.call(pb.FailRequest(rank=-1, reason=reason)))

    def ask_checkpoint(self, reason: str) -> None:
        """Asks for a checkpoint. Sets `not_asked` once it is known that none will be saved."""

        def ask(client: "CoordinatorClient") -> None:
            try:
                client.call(pb.AskCheckpointRequest(rank=-1, reason=reason), patience_s=ASK_S)
            except SwiftError as error:
                self.not_asked = True
                self._wake()
                self._complain(error)  # not retried, because a launcher that leaves does not wait for it

        self._enqueue(ask)

    def stop(self, run: str, reason: str) -> None:
        """Reports that this launcher was stopped, and its ranks have ended. `close` waits until this and all earlier
        notices are delivered."""
        self._must_drain = self._must_drain or self.view is not None
        self._enqueue(lambda client: client.call(pb.StopRequest(run=run, reason=reason)))

    @property
    def unheard(self) -> bool:
        return self._answered < self._enqueued

    def _enqueue(self, call: "Callable[[CoordinatorClient], object]") -> None:
        self._enqueued += 1
        self._calls.put(call)

    def close(self) -> None:
        """Ends the link; first delivers a reported failure, if possible within the time."""
        self._calls.put(None)
        if self._must_drain:
            self._thread.join(DRAIN_UNSEEN_S if self.view is None else DRAIN_S)
        self._closing = True

    def _run(self) -> None:
        # Imported in this thread, in parallel to the main thread, because grpc takes long to import.
        from swift_ft.coordinator_client import CoordinatorClient

        try:
            client = CoordinatorClient(self._address, self._job, tell=self._say)
        except SwiftError as error:  # its files were valid when the command checked them
            self.not_asked = True
            self._say(str(error))
            return
        with client:
            client.watch(self._on_view)
            while (call := self._calls.get()) is not None:
                self._make(call, client)
                self._answered += 1

    def _make(self, call: "Callable[[CoordinatorClient], object]", client: "CoordinatorClient") -> None:
        from swift_ft.coordinator_client import Unanswered

        while not self._closing:
            try:
                call(client)
                return
            except Unanswered:
                continue  # the missing answer was reported when it began (`_say`)
            except SwiftError as error:
                self._complain(error)
                return

    def _complain(self, error: SwiftError) -> None:
        # The coordinator does not know a job that no rank has joined; that is not worth a message.
        if self.view is not None and not self._closing:
            tell(error)

    def _say(self, line: str) -> None:
        if not self._closing:
            tell(line)

    def _on_view(self, view: pb.View) -> None:
        self.view = view
        self._wake()
