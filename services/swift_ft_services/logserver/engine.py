"""The log server without gRPC: append calls, the threads that write, start and shutdown.

Call sequence of an append::

    (pump of a session)  handle(): parse, check, core.append -> queue of the committer
    (committer)          takes the queued frames: storage.commit (group commit), core.made_durable
    (committer)          acknowledgements and credit into the sessions' outboxes, readers are woken
    (handler)            Outgoing.replies(): the outbox, merged into one message

Memory is bounded by the credit: a session's frames that are not durable yet take at most ``credit_bytes`` plus one
frame.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from swift_ft import events
from swift_ft._pb import log_pb2
from swift_ft.log.frame import Assembler
from swift_ft.log.protocol import Reason
from swift_ft.log.shared_memory import KEY_BYTES
from swift_ft_services.logserver.administration import Administration, DiskWatch, LostServers, Retention, tell
from swift_ft_services.logserver.append_session import Appends, Commits, Frame, Gathered, Quarantined, Queued
from swift_ft_services.logserver.core import Refusal
from swift_ft_services.logserver.reading import Reading
from swift_ft_services.logserver.segments import StorageError, StorageFailed
from swift_ft_services.logserver.shared_memory import BodyChanged, MemorySocket, SharedMemory
from swift_ft_services.logserver.state import AppendCall, EngineConfig, ServerState
from swift_ft_services.logserver.storage_interface import RecoveredJob, Storage, Write

_TAKEN_AT_ONCE = 16
"""Frames of a call that are accepted before others get the lock. Costs no throughput for large records or a single
job."""
_OTHERS_TURN_S = 0.0005
_QUEUED_MAX = 512
_POLL_S = 0.1


class Outgoing:
    """Replies to one writer, put from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gathered = Gathered()
        self._ended = False

    def put(self, item: "log_pb2.AppendReply | None", /) -> None:
        with self._changed:
            if item is None:
                self._ended = True
            else:
                self._gathered.add(item)
            self._changed.notify()

    def replies(self) -> Iterator[log_pb2.AppendReply]:
        """Yields replies until the session ends. Those that gather meanwhile are merged into one message."""
        while True:
            with self._changed:
                while self._gathered.empty and not self._ended:
                    self._changed.wait()
                reply = None if self._gathered.empty else self._gathered.drain()
                ended = self._ended
            if reply is not None:
                yield reply
            if ended:
                return


class Committer:
    """Two threads that run `Commits`. One takes queued frames, commits them as a group, then acknowledges them. The
    other creates files ahead, so that commits of other jobs do not wait for that."""

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


class LogEngine:
    """The operations that the gRPC servicer calls. Every public method may be called from any thread."""

    def __init__(
        self,
        storage: Storage,
        config: EngineConfig,
        free_bytes: Callable[[], int | None] = lambda: None,
        age_s: Callable[[str], float | None] = lambda job: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``free_bytes``: returns the free disk space, or None if unknown. ``age_s(job)``: returns the seconds since
        the job's files were last modified."""
        self.config = config
        self._clock = clock
        lock = threading.RLock()
        self.state = ServerState(storage, config, threading.Condition(lock))
        self.state.new_condition = lambda: threading.Condition(lock)
        self.committer = Committer(self.state, clock)
        self._appends = Appends(self.state, self.committer.commits)
        self.watch = DiskWatch(self.state, free_bytes, clock)
        self.administration = Administration(self.state, self.committer.wait_durable, self.watch, clock)
        self.reading = Reading(self.state, self.administration, clock)
        self.retention = Retention(self.state, self.administration, self.watch, age_s, clock)
        self.lost: LostServers | None = None
        """Only with an object store."""
        self._changed = self.state.changed
        self._memories: MemorySocket | None = None

    def take_over(self, recovered: RecoveredJob) -> None:
        self._appends.take_over(recovered, self._clock())

    def start(self, jobs: list[RecoveredJob]) -> None:
        for recovered in jobs:
            if recovered.apart:
                tell([self.state.set_apart(recovered.name, recovered.apart)])
                continue
            self.take_over(recovered)
            job = recovered.state
            for name, size in recovered.torn_bytes.items():
                events.emit("torn_tail", job=job.name, stream=name, bytes=size)
            for stream in recovered.streams:
                if reason := stream.corrupt_reason:
                    events.emit("stream_corrupt", job=job.name, stream=stream.name, reason=reason)
            events.emit(
                "recovered",
                job=job.name,
                generation=job.generation,
                streams=len(job.streams),
                records=job.tally.records,
            )
        self._memories = MemorySocket(self._take_memory, self.reading.take_reader)
        self.state.memory_socket = self._memories.name
        self.committer.start()
        self.administration.start()
        self.watch.check()
        self.retention.start()

    # -- appending ------------------------------------------------------------------------------------

    def attach(self) -> tuple[AppendCall, Outgoing]:
        """Registers a writer's call. Returns its session and its replies."""
        outgoing = Outgoing()
        session = AppendCall(
            outgoing, Assembler(self.config.body_bytes_max), memory_key=os.urandom(KEY_BYTES)
        )
        with self._changed:
            self._appends.attach(session)
        return session, outgoing

    def _take_memory(self, key: bytes, memory: SharedMemory) -> bool:
        """Takes a writer's memory for the call that has this key."""
        with self._changed:
            for session in self.state.sessions:
                if session.memory_key == key and session.memory is None:
                    session.memory = memory
                    return True
        return False

    def detach(self, session: AppendCall) -> None:
        with self._changed:
            self._appends.detach(session)

    def open(self, session: AppendCall, request: log_pb2.Open) -> None:
        with self._changed:
            self._appends.open(session, request, self._clock())

    def handle(self, session: AppendCall, frames: memoryview, shared: bytes = b"") -> None:
        """As `Appends.accept`, some frames at a time."""
        for some in self._appends.parse_some(session, frames, shared, _TAKEN_AT_ONCE):
            self._accept(session, some)
            if len(some) == _TAKEN_AT_ONCE and len(self.state.writers) > 1:
                time.sleep(_OTHERS_TURN_S)

    def _accept(self, session: AppendCall, parsed: list[Frame]) -> None:
        try:
            with self._changed:
                # Others' records queue after these: a flood of small records waits in its own call.
                while session.queued_records >= _QUEUED_MAX and not session.ended:
                    self._changed.wait(_POLL_S)
                try:
                    self._appends.accept(session, parsed)
                except Quarantined as refused:
                    self.administration.save_later(self.state.core.jobs[refused.stream.job])
                    raise
                finally:
                    self._changed.notify_all()
        except Quarantined as refused:
            stream = refused.stream
            events.emit("quarantined", job=stream.job, stream=stream.name, reason=stream.quarantined)
            raise

    def finish(self, session: AppendCall) -> None:
        """Called after the writer's last message. Raises Refused if that ended within a frame."""
        self._appends.parse(session, None)

    # -- the end --------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuses new records, waits until all accepted ones are durable and acknowledged, then ends the calls."""
        with self._changed:
            self.state.draining = True
            self.state.on_health(False)
            self.committer.wait_durable()
            self.state.end_sessions(Refusal(Reason.DRAINING, "the log server is shutting down"))
            self._changed.notify_all()

    def close(self) -> None:
        """Stops the threads and closes the storage; called after `drain`, once no call runs any more."""
        if self._memories is not None:
            self._memories.close()
        self.retention.stop()
        self.committer.stop()
        self.administration.stop()
        if not self.state.failed:
            self.administration.save_all()
        self.state.storage.close()
