"""The one thread that writes: takes what waits, commits it as a group, then acknowledges it."""

import threading
import time
from dataclasses import dataclass

from services.logserver.core import Refusal, StreamState
from services.logserver.state import Fsync, ServerState, Session
from services.logserver.storage import StorageFailed, StorageFull, Write
from swift import events
from swift._pb import log_pb2
from swift.log.wire import Reason

_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Queued:
    session: Session
    stream: StreamState
    write: Write


class Committer:
    """Frames that the core accepted, on their way to the storage."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._changed = state.changed
        self._queue: list[_Queued] = []
        self._accepted = 0  # frames that ever entered the queue, and those that left it for good
        self._settled = 0
        self._synced = 0  # how many of these the last sync covers, and how many one is asked for
        self._sync_target = 0
        self._unsynced_since: float | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="committer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, session: Session, stream: StreamState, write: Write) -> None:
        """(holding ``changed``, and notifying it afterwards)"""
        self._queue.append(_Queued(session, stream, write))
        self._accepted += 1

    def settle(self) -> None:
        """(holding ``changed``) Waits until everything accepted so far is durable, or was given up."""
        target = self._accepted
        if self._state.config.fsync is not Fsync.NEVER:
            self._sync_target = target
        must_be_synced = self._sync_target
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: self._state.failed or (self._settled >= target and self._synced >= must_be_synced)
        )

    def stop(self) -> None:
        """After settle. Ends the thread."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join()

    # -- the thread -----------------------------------------------------------------------------------

    def _loop(self) -> None:
        config = self._state.config
        timeout_s = config.fsync_interval_s if config.fsync is Fsync.INTERVAL else None
        while True:
            with self._changed:
                self._changed.wait_for(self._work_to_do, timeout_s)
                if self._stop and not self._queue:
                    return
                batch = self._take()
                sync = self._sync_due()
            if batch or sync:
                self._commit(batch, sync)

    def _take(self) -> list[_Queued]:
        """What goes into the next commit: so much that a sync is shared, not so much that it is slow."""
        size = count = 0
        for queued in self._queue:
            if size >= _BATCH_BYTES:
                break
            size += queued.write.size
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        return batch

    def _work_to_do(self) -> bool:
        return bool(self._queue) or self._stop or self._sync_target > self._synced

    def _sync_due(self) -> bool:
        config = self._state.config
        if config.fsync is Fsync.ALWAYS or self._sync_target > self._synced:
            return True
        if config.fsync is Fsync.NEVER or self._unsynced_since is None:
            return False
        return time.monotonic() - self._unsynced_since >= config.fsync_interval_s

    def _commit(self, batch: list[_Queued], sync: bool) -> None:
        try:
            self._state.storage.commit([queued.write for queued in batch], sync)
        except (StorageFull, StorageFailed) as error:
            self._give_up(error, len(batch))
            return
        with self._changed:
            self._settled += len(batch)
            if sync:
                self._unsynced_since = None
                self._synced = self._settled
            elif batch and self._unsynced_since is None:
                self._unsynced_since = time.monotonic()
            self._acknowledge(batch)
            if batch and self._state.full_since is not None:
                self._state.full_since = None
                events.emit("disk_has_space")
                self._state.on_health(True)
            self._changed.notify_all()

    def _acknowledge(self, batch: list[_Queued]) -> None:
        durable: dict[int, StreamState] = {}
        credit: dict[Session, int] = {}
        for queued in batch:
            self._state.core.made_durable(queued.stream, queued.write.sequence + 1)
            durable[queued.stream.tag] = queued.stream
            credit[queued.session] = credit.get(queued.session, 0) + queued.write.size
        for tag, stream in durable.items():
            holder = self._state.holders.get(tag)
            if holder is not None:
                acked = log_pb2.Acked(stream=stream.name, durable_sequence=stream.durable)
                holder.outbox.put(log_pb2.AppendReply(acked=[acked]))
        for session, size in credit.items():
            session.underway_bytes -= size
            session.outbox.put(log_pb2.AppendReply(credit_bytes=size))

    def _give_up(self, error: StorageFull | StorageFailed, taken: int) -> None:
        """Nothing of the batch, nor of what came after it, is in the log. Writers are told, and resend."""
        state = self._state
        with self._changed:
            if isinstance(error, StorageFull):
                state.full_since = time.monotonic()
                refusal = Refusal(Reason.FULL, str(error))
                events.emit("disk_full", reason=str(error))
            else:
                state.failed = str(error)
                refusal = Refusal(Reason.CLOSED, str(error))
                events.emit("storage_failed", reason=str(error))
            state.core.abandon()
            self._settled += taken + len(self._queue)
            self._synced = self._settled
            self._queue.clear()
            state.end_sessions(refusal)
            state.on_health(False)
            self._changed.notify_all()
