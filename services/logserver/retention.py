"""What is done without being asked: alarms follow the space there is, and logs that nobody wants grow old.

One thread. It looks at the disk twice a second. A job that nobody has wanted for a while (it has ended, or waits) gives
back the space that its files have taken ahead. With an age limit (off unless it is set) it drops jobs that have been
left alone for so long; a job that lives is never dropped by age.
"""

import gc
import logging
import threading
from collections.abc import Callable

from services.logserver.administration import Administration
from services.logserver.state import Refused, ServerState
from services.logserver.watch import DiskWatch
from swift import events

_EVERY_S = 0.5
_AGES_EVERY_S = 60.0
_LEFT_S = 10.0
"""A job that nobody has wanted for so long is written no more, for now."""
_FROZEN_EVERY = 20_000
_SEEN_IDLE_S = (
    3600.0  # the wall clock, which ages are told by, may be wrong: the server must have seen it idle too
)


class Retention:
    """(main thread) ``start``, ``stop``."""

    def __init__(
        self,
        state: ServerState,
        administration: Administration,
        watch: DiskWatch,
        age_s: Callable[[str], float | None],
        clock: Callable[[], float],
    ) -> None:
        """``age_s(job)``: for how long its files were not touched."""
        self._state = state
        self._administration = administration
        self._watch = watch
        self._age_s = age_s
        self._clock = clock
        self._stop = threading.Event()
        self._frozen = 0
        self._left: set[str] = set()
        """Jobs that have given back what they had taken ahead."""
        self._thread = threading.Thread(target=self._loop, name="retention", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        keep_s = self._state.config.keep_s
        ages_due_s = 0.0
        while not self._stop.wait(_EVERY_S):
            self._keep_records_out_of_collections()
            ages_due_s -= _EVERY_S
            drop_old = bool(keep_s) and ages_due_s <= 0
            if drop_old:
                ages_due_s = min(_AGES_EVERY_S, keep_s)
            try:
                self._watch.look()
                self.give_back()
                if drop_old:
                    self.drop_old(keep_s)
            except Exception:  # without it an alarm would never end
                logging.getLogger(__name__).exception("looking at the disk, or for old jobs, failed")

    def _keep_records_out_of_collections(self) -> None:
        """Python's collector stops everything while it goes through all objects there are: half a second for half a
        million records, which are in no cycle and need no collector. What is there by now is left out from now on."""
        records = sum(job.tally.records for job in list(self._state.core.jobs.values()))
        if abs(records - self._frozen) >= _FROZEN_EVERY:
            self._frozen = records
            gc.collect(1)
            gc.freeze()

    def give_back(self) -> None:
        """What jobs have taken ahead that nobody writes or reads."""
        with self._state.changed:
            now = self._clock()
            idle = {
                name for name in self._state.core.jobs if (self._state.idle_s(name, now) or 0.0) >= _LEFT_S
            }
        for name in idle - self._left:
            self._state.storage.give_back(name)
        self._left = idle

    def drop_old(self, keep_s: float) -> None:
        """Jobs that nobody has touched for so long."""
        for name in list(self._state.core.jobs):
            age_s = self._age_s(name)
            if age_s is None or age_s < keep_s:
                continue
            with self._state.changed:
                idle_s = self._state.idle_s(name, self._clock())
            if idle_s is None or idle_s < min(keep_s, _SEEN_IDLE_S):
                continue
            try:
                self._administration.drop(name, force=False, why=f"not touched for {age_s:.0f} s")
            except Refused as refused:
                events.emit("not_dropped", job=name, reason=str(refused))
