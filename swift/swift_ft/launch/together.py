"""Several machines and a script without a session: their launchers restart all ranks together, as torchrun's agents do.

They agree in the first machine's store, where the ranks of the first round meet too. Their keys are swift/NAME/ROUND.

    (a launcher)      a rank has ended: ``ask`` for the next round
    (each launcher)   `round` is newer than its own: it stops its ranks, and says so (``stopped``)
    (the first one)   all have stopped: it opens a store for the ranks of this round
    (each launcher)   `store_port` is known: it starts its ranks
    (a launcher)      no restart is left: ``fail``, which ends all launchers
    (each launcher)   its ranks have ended well: ``ended``; it leaves once those of all machines have

A launcher that takes a lost machine's place finds that its place has begun before, and asks for the next round.

A thread talks to the store, so that nothing here waits for a machine that is lost. Where the script has a session, the
coordinator is asked instead, and ``close`` ends this.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from swift_ft import events
from swift_ft.launch.ranks import MachinePlace
from swift_ft.launch.rendezvous import open_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOK_S = 0.2
TAKE_OVER_S = 2.0
"""Seconds for which a launcher in a lost machine's place waits for the coordinator, which may know of a session."""
EXIT_S_MAX = 300.0
"""Seconds that a machine whose ranks have ended well waits for the others; torchrun's limit."""
FAIL_S = 2.0
"""Seconds that a launcher that ends waits until the others can know of it."""


class Together:
    """One launcher's part. Its attributes are written by its thread alone."""

    def __init__(self, place: MachinePlace, timeout_s: float, wake: Callable[[], None]) -> None:
        """Initializes, and connects to the first machine's store in a thread."""
        self._place = place
        self._timeout_s = timeout_s
        self._wake = wake
        self._wishes: queue.SimpleQueue[Callable[[TCPStore], object]] = queue.SimpleQueue()
        self._closed = threading.Event()
        # The last round for which this machine's ranks have stopped, and in which they have ended well.
        self._stopped = self._ended = -1
        self._ended_at = 0.0
        self._store: TCPStore | None = None
        """(the first machine) The store for ranks of the newest round."""
        self.round = 0
        """The newest round that a launcher has asked for."""
        self.reason = ""
        """Why."""
        self.store_port: tuple[int, int] | None = None
        """A round whose ranks can begin, and the port of their store."""
        self._all_ended = False
        self.is_used = False
        """Ranks meet in a store (``used``)."""
        self.failed = ""
        """Why the job has failed."""
        self.lost = ""
        """Why the first machine's store is lost."""
        self._thread = threading.Thread(target=self._run, name="together", daemon=True)
        self._thread.start()

    # --- the main loop's thread ---

    @property
    def all_ended(self) -> bool:
        """The ranks of all machines have ended well; or this machine's have, and the first machine, which waits for
        the others, is gone."""
        return self._all_ended or (self._ended >= 0 and bool(self.lost))

    def used(self) -> None:
        """Tells the others that ranks meet in the first machine's store, so that they have no session."""
        self._wishes.put(lambda store: store.set("swift/used", ""))

    def ask(self, number: int, reason: str) -> None:
        """Asks for that round, unless another launcher has."""
        self._wishes.put(lambda store: store.compare_set(f"swift/round/{number}", "", reason))

    def stopped(self, number: int) -> None:
        """This machine's ranks have stopped, and are to begin in that round."""
        self._stopped = number
        self._wishes.put(lambda store: self._begin(store, number))

    def ended(self, number: int) -> None:
        """This machine's ranks have ended well in that round."""
        if self._ended != number:
            self._ended, self._ended_at = number, time.monotonic()
            self._wishes.put(lambda store: store.set(f"swift/ended/{number}/{self._place.number}", ""))

    def fail(self, reason: str) -> None:
        """Ends all launchers. Waits a moment for that."""
        told = threading.Event()

        def tell(store: "TCPStore") -> None:
            store.compare_set("swift/failed", "", reason)
            told.set()

        self._wishes.put(tell)
        told.wait(FAIL_S)
        if self._place.number == 0:  # its store ends with this process
            self._closed.wait(5 * LOOK_S)

    def close(self) -> None:
        self._closed.set()

    # --- its own ---

    def _run(self) -> None:
        try:
            store = open_store(
                self._place.master_addr, self._place.master_port, timeout_s=self._timeout_s, is_first=False
            )
            if self._begin(store, 0) > 1 and not self._closed.wait(TAKE_OVER_S):
                self._take_over(store)
            while not self._closed.wait(LOOK_S):
                while not self._wishes.empty():
                    self._wishes.get()(store)
                self._poll(store)
        except (RuntimeError, OSError) as error:  # torch's errors of a store
            self.lost = " ".join(str(error).split())
            events.emit("together_lost", reason=self.lost)
            self._wake()

    def _take_over(self, store: "TCPStore") -> None:
        """Makes all begin again after this launcher has taken a lost machine's place."""
        newest = 0
        while store.check([f"swift/round/{newest + 1}"]):
            newest += 1
        if newest == 0 or store.check([f"swift/began/{newest}/{self._place.number}"]):
            reason = "a machine was lost, and another one has its place"
            store.compare_set(f"swift/round/{newest + 1}", "", reason)

    def _begin(self, store: "TCPStore", number: int) -> int:
        """Returns how many launchers have begun in this place and round."""
        return int(store.add(f"swift/began/{number}/{self._place.number}", 1))

    def _poll(self, store: "TCPStore") -> None:
        before = (self.round, self.store_port, self._all_ended, self.failed)
        self.is_used = self.is_used or store.check(["swift/used"])
        while store.check([f"swift/round/{self.round + 1}"]):
            self.reason = store.get(f"swift/round/{self.round + 1}").decode()
            self.round += 1
        if self._stopped == self.round > 0:
            self._open_round(store, self.round)
        if self._ended == self.round:
            late = time.monotonic() - self._ended_at > EXIT_S_MAX
            self._all_ended = late or self._all(store, "ended", self.round)
        if store.check(["swift/failed"]):
            self.failed = store.get("swift/failed").decode()
        if before != (self.round, self.store_port, self._all_ended, self.failed):
            self._wake()

    def _open_round(self, store: "TCPStore", number: int) -> None:
        key = f"swift/port/{number}"
        if self._place.number == 0 and not store.check([key]) and self._all(store, "began", number):
            self._store = open_store("localhost", 0, timeout_s=self._timeout_s)
            store.set(key, str(self._store.port))
        if store.check([key]):
            self.store_port = number, int(store.get(key))

    def _all(self, store: "TCPStore", what: str, number: int) -> bool:
        machines = range(len(self._place.ranks_of))
        return bool(store.check([f"swift/{what}/{number}/{machine}" for machine in machines]))
