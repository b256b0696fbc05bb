"""The writing thread: takes queued frames, commits them as a group, then acknowledges them. A second thread creates
files ahead, so that commits of other jobs do not wait for that.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from swift_ft import events
from swift_ft_services.logserver.append_session import Commits, Queued
from swift_ft_services.logserver.quotas import Notice
from swift_ft_services.logserver.segments import StorageError, StorageFailed
from swift_ft_services.logserver.shared_memory import BodyChanged
from swift_ft_services.logserver.state import ServerState
from swift_ft_services.logserver.storage_interface import Write


def tell(news: Iterable[Notice]) -> None:
    """(without the server's lock) Emits the events."""
    for notice in news:
        events.emit(notice.event, **notice.fields)


class Committer:
    """Threads that run `Commits`."""

    def __init__(self, state: ServerState, clock: Callable[[], float]) -> None:
        self.commits = Commits(state)
        """(accessed while holding ``changed``, which is notified afterwards)"""
        self._state = state
        self._clock = clock
        self._changed = state.changed
        self._file_wanted = state.new_condition()
        self._stop = False
        self.on_commit: Callable[[Sequence[Write], float, str], None] = lambda *_: None
        """Called after each commit: what was written, the seconds, the error's name."""
        self._threads = [
            threading.Thread(target=self._loop, name="committer", daemon=True),
            threading.Thread(target=self._make_files, name="files", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_durable(self, job: str | None = None) -> None:
        """(holding ``changed``) Waits until all accepted records, of one job or of all, are durable or given up."""
        target = self.commits.ask_to_settle(job)
        self._changed.notify_all()
        self._changed.wait_for(lambda: self.commits.is_settled(target))

    def stop(self) -> None:
        """Ends the threads; called after `wait_durable`."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
            self._file_wanted.notify_all()
        for thread in self._threads:
            thread.join()

    # -- the threads ----------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            batch: list[Queued] = []
            try:
                with self._changed:
                    timeout_s = self.commits.next_sync_s(self._clock())
                    self._changed.wait_for(self._has_work, timeout_s)
                    if self._stop and self.commits.empty:
                        return
                    batch = self.commits.next_batch()
                    sync = self.commits.sync_due(batch, self._clock())
                if batch or sync:
                    self._commit(batch, sync)
            except Exception as error:  # a bug: writers and fences must not wait forever
                logging.getLogger(__name__).exception("commit failed")
                self._give_up(StorageFailed(f"internal error: {error!r}; start the server again"), batch)

    def _has_work(self) -> bool:
        if self.commits.file_wanted:
            self._file_wanted.notify_all()
        return self._stop or self.commits.work_to_do

    def _make_files(self) -> None:
        while True:
            with self._changed:
                self._file_wanted.wait_for(lambda: self._stop or self.commits.file_wanted)
                if self._stop:
                    return
                write = self.commits.take_file()
            if write is None:  # the storage has it by now
                continue
            try:
                self._state.storage.make_file(write.job, write.stream, write.sequence)
            except StorageError:  # its commit hits the same error and reports it
                pass
            except Exception:  # a bug: the commit creates the file itself
                logging.getLogger(__name__).exception("a file could not be made ahead")
            with self._changed:
                self.commits.file_made(write)
                self._changed.notify_all()

    def _commit(self, batch: list[Queued], sync: bool) -> None:
        writes = [queued.write for queued in batch]
        began = time.monotonic()
        try:
            unmended = self._state.storage.commit(writes, sync)
        except (StorageError, BodyChanged) as error:
            self.on_commit(writes, time.monotonic() - began, type(error).__name__)
            self._give_up(error, batch)
            return
        self.on_commit(writes, time.monotonic() - began, "")
        with self._changed:
            news = self.commits.committed(batch, sync, self._clock(), unmended)
            self._state.show_health()
            self._state.wake_readers({queued.stream.job for queued in batch})
            self._changed.notify_all()
        tell(news)

    def _give_up(self, error: StorageError | BodyChanged, batch: list[Queued]) -> None:
        with self._changed:
            news = self.commits.gave_up(error, batch, self._clock())
            self._state.show_health()
            self._changed.notify_all()
        tell(news)
