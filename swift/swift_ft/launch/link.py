"""The launcher's link to the coordinator: notices out, Views in, and neither ever delays a replacement.

(main thread)  `notify_exit`, `fail`: queued, sent in order by the link's own thread, each of them again and again
               until the coordinator answers: nobody else tells it of a death before the lease ends.
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
    from swift_ft.rpc.client import CoordinatorClient


DRAIN_S = 5.0
"""How long the end of the launcher waits until the coordinator knows that the job failed."""
DRAIN_UNSEEN_S = 3.0
"""The same, if the coordinator has never answered: perhaps there is none, or no such job."""


class CoordinatorLink:
    """Opened at the start of the launcher, closed at its end."""

    def __init__(self, address: str, job: str, wake: Callable[[], None]) -> None:
        self._address = address
        self._job = job
        self._wake = wake
        self._calls: queue.SimpleQueue[Callable[[CoordinatorClient], object] | None] = queue.SimpleQueue()
        self._told = 0
        self._answered = 0
        self._must_drain = False
        self._closing = False
        self.view: pb.View | None = None
        """The newest View; None until the job is known to the coordinator."""
        self.not_asked = False
        self._thread = threading.Thread(target=self._run, name="coordinator-link", daemon=True)
        self._thread.start()

    def notify_exit(
        self, rank: int, pid: int, exit_code: int, incarnation: str, *, given_up: bool = False
    ) -> None:
        """A child has exited. `given_up`: no process takes its place."""
        self._tell(lambda client: client.member_exited(rank, pid, exit_code, incarnation, given_up=given_up))

    def notify_given_up(self, rank: int) -> None:
        """No process takes the place of that rank, whose last one has exited before."""
        self._tell(lambda client: client.place_given_up(rank))

    def notify_unfit(self, rank: int, reason: str) -> None:
        """The place of that rank has failed its health check, so that no process gets it."""
        self._tell(lambda client: client.place_unfit(rank, reason))

    def notify_rehearsed(
        self,
        rank: int,
        version: int,
        *,
        under_way: bool = False,
        steps: int = 0,
        difference: str = "",
        why_not: str = "",
    ) -> None:
        """A rehearsal of that rank begins, or what has come of it."""
        self._tell(
            lambda client: client.rehearsed(
                rank, version, under_way=under_way, steps=steps, difference=difference, why_not=why_not
            )
        )

    def fail(self, reason: str) -> None:
        """The job cannot go on. `close` waits for this to arrive."""
        self._must_drain = True
        self._tell(lambda client: client.fail(reason))

    def ask_checkpoint(self, reason: str) -> None:
        """Soon. `not_asked` is true from when it is known that nobody will make it."""

        def ask(client: "CoordinatorClient") -> None:
            try:
                client.ask_last_checkpoint(reason)
            except SwiftError as error:
                self.not_asked = True
                self._wake()
                self._complain(error)  # and not again: whoever leaves does not wait for it

        self._tell(ask)

    def stop(self, run: str, reason: str) -> None:
        """This launcher was told to stop, and its ranks have ended. `close` waits for this and what was told before."""
        self._must_drain = self._must_drain or self.view is not None
        self._tell(lambda client: client.stop(run, reason))

    @property
    def unheard(self) -> bool:
        """The coordinator has not answered yet to all that it was told."""
        return self._answered < self._told

    def _tell(self, call: "Callable[[CoordinatorClient], object]") -> None:
        self._told += 1
        self._calls.put(call)

    def close(self) -> None:
        """Ends the link; a failure that was told is delivered first, as far as that works within the time."""
        self._calls.put(None)
        if self._must_drain:
            self._thread.join(DRAIN_UNSEEN_S if self.view is None else DRAIN_S)
        self._closing = True

    def _run(self) -> None:
        # Imported here, beside the main thread: grpc takes a while.
        from swift_ft.rpc.client import CoordinatorClient

        try:
            client = CoordinatorClient(self._address, self._job, tell=self._say)
        except SwiftError as error:  # its files were good when the command looked
            self.not_asked = True
            self._say(str(error))
            return
        with client:
            client.watch(self._on_view)
            while (call := self._calls.get()) is not None:
                self._make(call, client)
                self._answered += 1

    def _make(self, call: "Callable[[CoordinatorClient], object]", client: "CoordinatorClient") -> None:
        from swift_ft.rpc.client import Unanswered

        while not self._closing:
            try:
                call(client)
                return
            except Unanswered:
                continue  # that nobody answers was said when it began (`_say`)
            except SwiftError as error:
                self._complain(error)
                return

    def _complain(self, error: SwiftError) -> None:
        # Of a job that nobody has joined the coordinator knows nothing; that is no news.
        if self.view is not None and not self._closing:
            tell(error)

    def _say(self, line: str) -> None:
        if not self._closing:
            tell(line)

    def _on_view(self, view: pb.View) -> None:
        self.view = view
        self._wake()
