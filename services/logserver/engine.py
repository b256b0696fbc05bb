"""What makes the core's decisions real: one committer thread, sessions of writers, readers that follow.

Call sequence of an append::

    (pump of a session)  handle(): parse, check, core.append -> queue of the committer
    (committer)          takes the whole queue: storage.commit (group commit), core.made_durable
    (committer)          acknowledgements and credit into the sessions' outboxes, readers are woken
    (handler)            session.replies(): what is in the outbox, merged into one message

One lock, `_changed`, guards the core; it is never held during disk work. `_admin` lets one fence, trim or
reset happen at a time. Memory is bounded by the credit: a session's frames that are not durable yet take at most
``credit_bytes`` plus one frame.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from services.logserver.core import Hole, JobState, LogCore, Refusal, StreamState
from services.logserver.storage import (
    JobMeta,
    RecoveredJob,
    Storage,
    StorageFailed,
    StorageFull,
    StreamMeta,
    Write,
)
from swift import events
from swift._pb import log_pb2
from swift.errors import LogError, RecordCorrupt, UsageError
from swift.log.frame import (
    FrameHeader,
    FrameIncomplete,
    FrameOversize,
    check_body,
    decode_header,
)
from swift.log.record import check_name
from swift.log.wire import Reason, frames_message

_READ_BATCH_BYTES = 1 << 20
_FULL_RETRY_S = 1.0


class Fsync(StrEnum):
    """When an append is acknowledged."""

    ALWAYS = "always"
    """After fdatasync; appends that wait together share one."""
    INTERVAL = "interval"
    """After the write; synced every so often. A power cut loses at most that long; a killed process nothing."""
    NEVER = "never"
    """After the write; the kernel syncs when it likes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    fsync: Fsync = Fsync.ALWAYS
    fsync_interval_s: float = 0.1
    credit_bytes: int = 64 << 20
    """Bytes that one writer may have under way."""
    body_bytes_max: int = 256 << 20
    """Largest body that is accepted."""


class Refused(Exception):
    """Ends a call with the refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(slots=True, eq=False)
class Session:
    """One Append call: the streams it opened, and what goes back to it."""

    outbox: "queue.SimpleQueue[log_pb2.AppendReply | None]" = field(default_factory=queue.SimpleQueue)
    streams: dict[int, tuple[StreamState, int]] = field(default_factory=dict)
    """Stream tag -> the stream and the generation it was opened under."""
    underway_bytes: int = 0
    refusal: Refusal | None = None
    ended: bool = False

    def end(self, refusal: Refusal | None = None) -> None:
        """After what is in the outbox already, the call ends."""
        if not self.ended:
            self.ended = True
            self.refusal = refusal
            self.outbox.put(None)

    def replies(self) -> Iterator[log_pb2.AppendReply]:
        """Until the session ends. What has gathered meanwhile goes out as one message."""
        while True:
            reply = self.outbox.get()
            if reply is None:
                return
            last = False
            while not self.outbox.empty():
                more = self.outbox.get()
                if more is None:
                    last = True
                    break
                reply.MergeFrom(more)
            yield reply
            if last:
                return


@dataclass(frozen=True, slots=True)
class _Queued:
    session: Session
    stream: StreamState
    write: Write
    frame_bytes: int


class LogEngine:
    """All that the gRPC servicer calls. Every public method may be called from any thread."""

    def __init__(self, storage: Storage, config: EngineConfig) -> None:
        self.config = config
        self.core = LogCore()
        self.on_health: Callable[[bool], None] = lambda serving: None
        self._storage = storage
        self._changed = threading.Condition()
        self._admin = threading.Lock()
        self._queue: list[_Queued] = []
        self._accepted = 0  # frames that ever entered the queue, and those that left it for good
        self._settled = 0
        self._sync_wanted = False
        self._unsynced_since: float | None = None
        self._holders: dict[int, Session] = {}  # stream tag -> who writes it
        self._sessions: set[Session] = set()
        self._full_since: float | None = None
        self._failed = ""
        self._draining = False
        self._stop = False
        self._reader_ids = iter(range(1 << 62))
        self._janitor_queue: queue.SimpleQueue[tuple[str, str, int, int] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._commit_loop, name="committer", daemon=True),
            threading.Thread(target=self._janitor_loop, name="janitor", daemon=True),
        ]

    def start(self, jobs: list[RecoveredJob]) -> None:
        """Takes over what the storage recovered, and begins to work."""
        for recovered in jobs:
            job = self.core.job(recovered.name)
            job.generation = recovered.meta.generation
            job.trimmed_below_step = job.trim_wanted = recovered.meta.trimmed_below_step
            for found in recovered.streams:
                stream = job.stream(found.name)
                stream.first = found.first
                stream.durable = stream.appended = found.next_sequence
                stream.quarantined = found.quarantined
                for entry in found.entries:
                    stream.add(entry)
                stream.holes = [hole for hole in found.holes if hole.below_step > job.trimmed_below_step]
                stream.check()
                if found.torn_bytes:
                    events.emit("torn_tail", job=job.name, stream=found.name, bytes=found.torn_bytes)
                if stream.corrupt_reason:
                    events.emit(
                        "stream_corrupt", job=job.name, stream=found.name, reason=stream.corrupt_reason
                    )
            events.emit(
                "recovered",
                job=job.name,
                generation=job.generation,
                streams=len(job.streams),
                records=sum(len(stream.by_sequence) for stream in job.streams.values()),
            )
        for thread in self._threads:
            thread.start()

    # -- appending ------------------------------------------------------------------------------------

    def attach(self) -> Session:
        """A writer has connected: welcome and the first credit."""
        session = Session()
        session.outbox.put(
            log_pb2.AppendReply(
                welcome=log_pb2.Welcome(frame_bytes_max=self.config.body_bytes_max),
                credit_bytes=self.config.credit_bytes,
            )
        )
        with self._changed:
            self._check_open()
            self._sessions.add(session)
        return session

    def detach(self, session: Session) -> None:
        with self._changed:
            session.end()
            self._sessions.discard(session)
            for tag in session.streams:
                if self._holders.get(tag) is session:
                    del self._holders[tag]

    def open(self, session: Session, request: log_pb2.Open) -> None:
        _check_names(request.job, request.stream)
        with self._changed:
            self._check_open()
            if self._full_since is not None and time.monotonic() - self._full_since < _FULL_RETRY_S:
                raise Refused(Refusal(Reason.FULL, "no space left; free some, or trim the log"))
            stream = self.core.open(request.job, request.stream, request.generation, request.acked_sequence)
            if isinstance(stream, Refusal):
                raise Refused(stream)
            session.streams[stream.tag] = (stream, request.generation)
            self._holders[stream.tag] = session
            session.outbox.put(
                log_pb2.AppendReply(
                    opened=[log_pb2.Opened(stream=stream.name, next_sequence=stream.appended)],
                    acked=[log_pb2.Acked(stream=stream.name, durable_sequence=stream.durable)],
                )
            )

    def handle(self, session: Session, frames: memoryview) -> None:
        """Frames of streams that the session has opened. Raises Refused; what came before is kept."""
        parsed = self._parse(frames)
        with self._changed:
            given_back = 0
            try:
                for header, frame in parsed:
                    given_back += self._accept(session, header, frame)
            finally:
                if given_back:
                    session.outbox.put(log_pb2.AppendReply(credit_bytes=given_back))
                self._changed.notify_all()

    def _parse(self, frames: memoryview) -> list[tuple[FrameHeader, memoryview]]:
        parsed = []
        offset = 0
        try:
            while offset < len(frames):
                header = decode_header(frames, offset, self.config.body_bytes_max)
                end = offset + header.frame_bytes
                if end > len(frames):
                    raise FrameIncomplete(f"{header.key}: the message ends before the frame does")
                check_body(header, frames[offset + header.header_bytes : end])
                parsed.append((header, frames[offset:end]))
                offset = end
        except RecordCorrupt as error:
            raise Refused(Refusal(Reason.CORRUPT, f"damaged on the way here: {error}")) from None
        except FrameOversize as error:
            raise Refused(Refusal(Reason.OVERSIZE, str(error))) from None
        except LogError as error:
            raise Refused(Refusal(Reason.INVALID, str(error))) from None
        return parsed

    def _accept(self, session: Session, header: FrameHeader, frame: memoryview) -> int:
        """Queues a frame; gives the credit to return at once."""
        self._check_open()
        if session.ended:
            raise Refused(session.refusal or Refusal(Reason.CLOSED, "the call has ended"))
        opened = session.streams.get(header.stream_tag)
        if opened is None or self._holders.get(header.stream_tag) is not session:
            raise Refused(Refusal(Reason.NOT_OPEN, f"{header.key}: its stream is not open in this call"))
        stream, generation = opened
        entry = self.core.append(stream, generation, header)
        if isinstance(entry, Refusal):
            if stream.quarantined:
                events.emit("quarantined", job=stream.job, stream=stream.name, reason=stream.quarantined)
            raise Refused(entry)
        if entry is None:
            session.outbox.put(
                log_pb2.AppendReply(
                    acked=[log_pb2.Acked(stream=stream.name, durable_sequence=stream.durable)]
                )
            )
            return len(frame)
        session.underway_bytes += len(frame)
        if session.underway_bytes > self.config.credit_bytes + self.config.body_bytes_max:
            raise Refused(Refusal(Reason.INVALID, "more bytes under way than were granted"))
        write = Write(stream.job, stream.name, header.sequence, frame)
        self._queue.append(_Queued(session, stream, write, len(frame)))
        self._accepted += 1
        return 0

    def _check_open(self) -> None:
        if self._failed:
            raise Refused(Refusal(Reason.CLOSED, self._failed))
        if self._draining:
            raise Refused(Refusal(Reason.DRAINING, "the log server is shutting down"))

    # -- the committer --------------------------------------------------------------------------------

    def _commit_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._work_to_do, timeout=self.config.fsync_interval_s)
                if self._stop and not self._queue:
                    return
                batch, self._queue = self._queue, []
                sync = self._sync_due()
                self._sync_wanted = False
            if batch or sync:
                self._commit(batch, sync)

    def _work_to_do(self) -> bool:
        return bool(self._queue) or self._stop or self._sync_wanted

    def _sync_due(self) -> bool:
        if self.config.fsync is Fsync.ALWAYS or self._sync_wanted:
            return True
        if self.config.fsync is Fsync.NEVER or self._unsynced_since is None:
            return False
        return time.monotonic() - self._unsynced_since >= self.config.fsync_interval_s

    def _commit(self, batch: list[_Queued], sync: bool) -> None:
        try:
            self._storage.commit([queued.write for queued in batch], sync)
        except (StorageFull, StorageFailed) as error:
            self._give_up(error, len(batch))
            return
        with self._changed:
            if sync:
                self._unsynced_since = None
            elif batch and self._unsynced_since is None:
                self._unsynced_since = time.monotonic()
            durable: dict[int, StreamState] = {}
            credit: dict[Session, int] = {}
            for queued in batch:
                self.core.made_durable(queued.stream, queued.write.sequence + 1)
                durable[queued.stream.tag] = queued.stream
                credit[queued.session] = credit.get(queued.session, 0) + queued.frame_bytes
            for tag, stream in durable.items():
                holder = self._holders.get(tag)
                if holder is not None:
                    acked = log_pb2.Acked(stream=stream.name, durable_sequence=stream.durable)
                    holder.outbox.put(log_pb2.AppendReply(acked=[acked]))
            for session, size in credit.items():
                session.underway_bytes -= size
                session.outbox.put(log_pb2.AppendReply(credit_bytes=size))
            self._settled += len(batch)
            if batch and self._full_since is not None:
                self._full_since = None
                events.emit("disk_has_space")
                self.on_health(True)
            self._changed.notify_all()

    def _give_up(self, error: StorageFull | StorageFailed, taken: int) -> None:
        """Nothing of the batch, nor of what came after it, is in the log. Writers are told and resend."""
        with self._changed:
            if isinstance(error, StorageFull):
                self._full_since = time.monotonic()
                refusal = Refusal(Reason.FULL, str(error))
                events.emit("disk_full", reason=str(error))
            else:
                self._failed = str(error)
                refusal = Refusal(Reason.CLOSED, str(error))
                events.emit("storage_failed", reason=str(error))
            self.core.abandon()
            self._settled += taken + len(self._queue)
            self._queue.clear()
            for session in self._sessions:
                session.end(refusal)
            self.on_health(False)
            self._changed.notify_all()

    def _settle(self) -> None:
        """(holding `_changed`) Waits until everything accepted so far is durable, or was given up."""
        target = self._accepted
        self._sync_wanted = self.config.fsync is not Fsync.NEVER
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._failed or (self._settled >= target and not self._sync_wanted))

    # -- administration -------------------------------------------------------------------------------

    def fence(self, job_name: str, generation: int) -> int:
        _check_names(job_name)
        with self._admin:
            with self._changed:
                if self._failed:
                    raise Refused(Refusal(Reason.CLOSED, self._failed))
                if generation == 0:
                    raise Refused(Refusal(Reason.INVALID, "generation 0 cannot be granted; they start at 1"))
                refusal = self.core.fence(job_name, generation)
                if refusal is not None:
                    raise Refused(refusal)
                self._settle()
                meta = self._meta(self.core.job(job_name))
            self._save(job_name, meta)
            events.emit("fence", job=job_name, generation=generation)
            return generation

    def trim(self, job_name: str, below_step: int) -> int:
        _check_names(job_name)
        with self._admin:
            with self._changed:
                job = self.core.jobs.get(job_name)
                if job is None:
                    return 0
            return self._trim(job, below_step)

    def _trim(self, job: JobState, below_step: int) -> int:
        with self._changed:
            before = job.trimmed_below_step
            changed = self.core.trim(job, below_step)
            meta = self._meta(job)
            trimmed = job.trimmed_below_step
        if trimmed > before:
            self._save(job.name, meta)
            self._clean(changed)
            events.emit("trimmed", job=job.name, below_step=trimmed)
        return trimmed

    def reset(self, job_name: str, generation: int) -> None:
        _check_names(job_name)
        with self._admin:
            with self._changed:
                job = self.core.job(job_name)
                refusal = self.core.check_generation(job, generation)
                if refusal is not None:
                    raise Refused(refusal)
                for tag, holder in list(self._holders.items()):
                    if holder.streams[tag][0].job == job_name:
                        holder.end(Refusal(Reason.NOT_OPEN, f"job {job_name} was reset"))
                        del self._holders[tag]
                self._settle()
                changed = self.core.reset(job, generation)
                assert not isinstance(changed, Refusal)
                meta = self._meta(job)
            self._save(job_name, meta)
            self._clean(changed)
            events.emit("reset", job=job_name, generation=generation)

    def _meta(self, job: JobState) -> JobMeta:
        return JobMeta(
            generation=job.generation,
            trimmed_below_step=job.trimmed_below_step,
            streams={
                name: StreamMeta(stream.first, stream.durable, stream.quarantined)
                for name, stream in job.streams.items()
            },
        )

    def _save(self, job: str, meta: JobMeta) -> None:
        try:
            self._storage.save(job, meta)
        except (StorageFull, StorageFailed) as error:
            reason = Reason.FULL if isinstance(error, StorageFull) else Reason.CLOSED
            raise Refused(Refusal(reason, str(error))) from None

    def _clean(self, streams: list[StreamState]) -> None:
        for stream in streams:
            self._janitor_queue.put((stream.job, stream.name, stream.first, stream.appended))

    def _janitor_loop(self) -> None:
        while True:
            work = self._janitor_queue.get()
            if work is None:
                return
            freed = self._storage.remove(*work)
            if freed:
                events.emit("freed", job=work[0], stream=work[1], bytes=freed)
                with self._changed:
                    if self._full_since is not None:
                        self._full_since = -_FULL_RETRY_S

    # -- reading --------------------------------------------------------------------------------------

    def read(self, request: log_pb2.ReadRequest, alive: Callable[[], bool]) -> Iterator[bytes]:
        """Encoded ReadReplies. Holds a lease on the steps from ``from_step`` on: a trim waits for it."""
        _check_names(request.job, request.stream)
        with self._changed:
            job = self.core.job(request.job)
            refusal = self.core.check_readable(job, request.from_step)
            if refusal is not None:
                raise Refused(refusal)
            reader = next(self._reader_ids)
            job.readers[reader] = request.from_step
        try:
            yield from self._follow(job, request, alive)
        finally:
            with self._changed:
                del job.readers[reader]
                waiting = job.trim_wanted > job.trimmed_below_step and not self._stop
            if waiting:
                with self._admin:
                    self._trim(job, 0)

    def _follow(
        self, job: JobState, request: log_pb2.ReadRequest, alive: Callable[[], bool]
    ) -> Iterator[bytes]:
        sequence = request.from_sequence
        while alive():
            with self._changed:
                plan, sequence, refusal = self._plan_read(job, request, sequence)
                if not plan and refusal is None:
                    if self._draining or self._failed:
                        self._check_open()
                    if not request.follow:
                        return
                    self._changed.wait(0.5)
                    continue
            frames: list[bytes] = []
            for stream, entry_sequence, frame_bytes in plan:
                try:
                    frames.append(self._read_one(stream, entry_sequence, frame_bytes))
                except RecordCorrupt as error:
                    refusal = self._found_damage(stream, entry_sequence, str(error))
                    break
            if frames:
                yield frames_message(frames, sum(map(len, frames)))
            if refusal is not None:
                raise Refused(refusal)

    def _plan_read(
        self, job: JobState, request: log_pb2.ReadRequest, sequence: int
    ) -> tuple[list[tuple[StreamState, int, int]], int, Refusal | None]:
        """The next records to read, the sequence behind them, and what ends the call after them."""
        plan: list[tuple[StreamState, int, int]] = []
        stream = job.streams.get(request.stream)
        size = 0
        while stream is not None and size < _READ_BATCH_BYTES:
            entry = self.core.next_to_read(stream, sequence, request.from_step)
            if isinstance(entry, Refusal):
                return plan, sequence, entry
            if entry is None:
                break
            plan.append((stream, entry.sequence, entry.frame_bytes))
            sequence = entry.sequence + 1
            size += entry.frame_bytes
        return plan, sequence, None

    def _read_one(self, stream: StreamState, sequence: int, frame_bytes: int) -> bytes:
        """The frame, its checksums verified. Raises RecordCorrupt; Refused if it was dropped meanwhile."""
        try:
            data = self._storage.read(stream.job, stream.name, sequence, frame_bytes)
        except FileNotFoundError:
            message = f"record {sequence} of {stream.name} was dropped while it was read"
            raise Refused(Refusal(Reason.TRIMMED, message)) from None
        except OSError as error:
            raise RecordCorrupt(f"it cannot be read: {error.strerror}") from None
        try:
            header = decode_header(data, 0, 1 << 62)
            if (
                header.frame_bytes != len(data)
                or header.sequence != sequence
                or header.stream_tag != stream.tag
            ):
                raise RecordCorrupt("another record is in its place")
            check_body(header, memoryview(data)[header.header_bytes :])
        except LogError as error:
            raise RecordCorrupt(str(error)) from None
        return data

    def _found_damage(self, stream: StreamState, sequence: int, reason: str) -> Refusal:
        with self._changed:
            entry = stream.by_sequence.get(sequence)
            name = f"{stream.name} {entry.key}" if entry is not None else stream.name
            reason = f"record {sequence} of {name}: {reason}"
            if entry is not None and stream.hole_at(sequence) is None:
                stream.holes.insert(0, Hole(sequence, sequence + 1, entry.key.step + 1, reason))
        events.emit("stream_corrupt", job=stream.job, stream=stream.name, reason=reason)
        return Refusal(Reason.CORRUPT, reason)

    def digests(self, request: log_pb2.DigestsRequest) -> list[log_pb2.RecordDigest]:
        _check_names(request.job, request.stream)
        with self._changed:
            job = self.core.job(request.job)
            refusal = self.core.check_readable(job, request.from_step)
            stream = job.streams.get(request.stream)
            if refusal is None and stream is not None:
                for hole in stream.holes:
                    if hole.below_step > request.from_step:
                        refusal = Refusal(Reason.CORRUPT, f"{stream.name}: {hole.reason}")
            if refusal is not None:
                raise Refused(refusal)
            if stream is None:
                return []
            return [
                log_pb2.RecordDigest(
                    step=entry.key.step,
                    microbatch=entry.key.microbatch,
                    slot=entry.key.slot,
                    digest=entry.digest,
                )
                for entry in self.core.digests(stream, request.from_step)
            ]

    def inventory(self, job_name: str) -> log_pb2.InventoryReply:
        _check_names(job_name)
        with self._changed:
            job = self.core.jobs.get(job_name)
            if job is None:
                return log_pb2.InventoryReply()
            return log_pb2.InventoryReply(
                generation=job.generation,
                trimmed_below_step=job.trimmed_below_step,
                streams=[_stream_inventory(job.streams[name]) for name in sorted(job.streams)],
            )

    # -- the end --------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes nothing more; everything accepted becomes durable and is acknowledged; calls end."""
        with self._changed:
            self._draining = True
            if not self._failed:
                self._settle()
            for session in self._sessions:
                session.end(Refusal(Reason.DRAINING, "the log server is shutting down"))
            self._changed.notify_all()

    def close(self) -> None:
        """After drain, and once no call runs any more."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._janitor_queue.put(None)
        for thread in self._threads:
            thread.join()
        if not self._failed:
            for job in self.core.jobs.values():
                if job.generation:
                    try:
                        self._save(job.name, self._meta(job))
                    except Refused:
                        break  # no space: the manifest of before is as true
        self._storage.close()


def _check_names(job: str, stream: str = "x") -> None:
    try:
        check_name("job", job)
        check_name("stream", stream)
    except UsageError as error:
        raise Refused(Refusal(Reason.INVALID, str(error))) from None


def _stream_inventory(stream: StreamState) -> log_pb2.StreamInventory:
    steps = [entry.key.step for entry in stream.by_sequence.values()]
    return log_pb2.StreamInventory(
        stream=stream.name,
        records=len(steps),
        bytes=stream.bytes,
        has_records=bool(steps),
        first_step=min(steps, default=0),
        last_step=max(steps, default=0),
        next_sequence=stream.appended,
        durable_sequence=stream.durable,
        corrupt=bool(stream.corrupt_reason),
        reason=stream.corrupt_reason,
    )
