"""A writer's call: which streams it may open, which frames are accepted, its replies. No I/O, no clock, no threads."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from swift_ft._pb import log_pb2
from swift_ft.errors import LogError, RecordCorrupt, RecordInvalid
from swift_ft.log.frame import FrameHeader, FrameOversize, decode_header
from swift_ft.log.protocol import Fsync, Reason
from swift_ft.log.shared_memory import PLACE
from swift_ft_services.logserver.core import Refusal, Refused, StreamState, cannot_be_mended
from swift_ft_services.logserver.quotas import Notice
from swift_ft_services.logserver.segments import (
    JobDamaged,
    StorageBusy,
    StorageError,
    StorageFull,
)
from swift_ft_services.logserver.shared_memory import BodyChanged, Part, SharedBody
from swift_ft_services.logserver.state import AppendCall, ServerState, check_names
from swift_ft_services.logserver.storage_interface import RecoveredJob, Write

# Queue of accepted frames: what to write next, when a sync is due, what is acknowledged after it. No I/O, no clock.
#
# Each job has a queue of its own, and queues take turns: a commit contains frames of one job. While others write, a
# turn is short, so that no job waits for another one's many files. A file that a record begins is created ahead,
# concurrently with the commits of other jobs. In a queue::
#
#     settled <= accepted       frames that left the queue for good, and that ever entered it
#     synced  <= settled        how many of these the last sync covers
#
# Call sequence (`engine.Committer` does the I/O, and holds the server's lock around each call)::
#
#     put(session, stream, write)               a frame that the core accepted
#     write = take_file(); file_made(write)     while file_wanted, created while other jobs commit
#     batch = next_batch(); sync = sync_due(batch, now)   while work_to_do; then the storage writes and syncs it
#     committed(batch, sync, now, unmended)     or gave_up(error, batch, now)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Limits of one commit; the last record is taken whole."""

    bytes: int
    records: int
    streams: int
    """Streams; each is a separate file to write and to sync."""


ALONE = Turn(bytes=16 << 20, records=1000, streams=1000)
"""Limits while one job writes: large enough to share a sync, small enough not to delay it."""
AMONG_OTHERS = Turn(bytes=4 << 20, records=64, streams=4)
"""Limits while several jobs write. Only streams whose file exists: creating one takes several syncs and a manifest."""


@dataclass(frozen=True, slots=True)
class Queued:
    session: AppendCall
    stream: StreamState
    write: Write
    fsync: Fsync


@dataclass(slots=True, eq=False)
class Line:
    """Queue of a job's frames. It exists while a write, a sync or an acknowledgement is owed."""

    queue: deque[Queued] = field(default_factory=deque)
    accepted: int = 0
    settled: int = 0
    synced: int = 0
    promised: int = 0
    """Count up to which frames are owed a sync, now or soon."""
    sync_target: int = 0
    """Count up to which a sync was requested."""
    file_made: Write | None = None
    """Record whose file was created ahead, or could not be; then its commit raises the error."""

    @property
    def over(self) -> bool:
        return self.settled == self.accepted and self.synced >= self.promised

    @property
    def underway(self) -> bool:
        """True if frames were taken and their commit is not finished."""
        return self.settled + len(self.queue) < self.accepted


@dataclass(frozen=True, slots=True)
class Target:
    """Condition to wait for: counts of settled and synced frames per queue."""

    job: str | None
    lines: list[tuple[Line, int, int]]


class Commits:
    """Frames that the core accepted, on their way to the storage."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._lines: dict[str, Line] = {}
        """Queue per job; the first one has its turn next."""
        self._making_file: Write | None = None
        self._unsynced_since: float | None = None

    def put(self, session: AppendCall, stream: StreamState, write: Write, fsync: Fsync) -> None:
        line = self._lines.setdefault(stream.job, Line())
        line.queue.append(Queued(session, stream, write, fsync))
        line.accepted += 1
        if fsync is not Fsync.NEVER:
            line.promised = line.accepted

    def ask_to_settle(self, job: str | None = None) -> Target:
        """Returns the condition that all frames accepted so far (of one job, or of all) are durable or given up."""
        lines = self._lines.values() if job is None else [self._lines[job]] if job in self._lines else []
        for line in lines:
            line.sync_target = max(line.sync_target, line.promised)
        return Target(job, [(line, line.accepted, line.sync_target) for line in lines])

    def is_settled(self, target: Target) -> bool:
        """Returns whether all frames accepted before the target are durable or given up."""
        if self._state.failed:
            return True
        making = self._making_file
        # The caller may be about to drop the job.
        if making is not None and target.job in (None, making.job):
            return False
        return all(
            line.settled >= settled and line.synced >= synced for line, settled, synced in target.lines
        )

    @property
    def unsettled(self) -> int:
        """Frames, of all jobs, that were accepted and did not leave their queues for good yet."""
        return sum(line.accepted - line.settled for line in self._lines.values())

    @property
    def empty(self) -> bool:
        return not any(line.queue for line in self._lines.values())

    @property
    def _sync_is_asked_for(self) -> bool:
        return any(line.sync_target > line.synced for line in self._lines.values())

    @property
    def work_to_do(self) -> bool:
        if self._next() is not None:
            return True
        return any(line.sync_target > line.synced < line.settled for line in self._lines.values())

    def _is_alone(self, job: str) -> bool:
        # Counts connected writers as well as queues: a writer's record may arrive just after a long turn has begun, and
        # the writer of queued frames may have left already.
        return all(other == job for other in chain(self._state.writers, self._lines))

    def _lacks_file(self, write: Write) -> bool:
        return not (write.mends or self._state.storage.has_file(write.job, write.stream, write.sequence))

    def _next(self) -> str | None:
        for job, line in self._lines.items():
            if not line.queue or (self._making_file is not None and self._making_file.job == job):
                continue
            first = line.queue[0].write
            if line.file_made is first or self._is_alone(job) or not self._lacks_file(first):
                return job
        return None

    @property
    def file_wanted(self) -> Write | None:
        """Record whose file should be created ahead, if any."""
        if self._making_file is not None:
            return None
        for job, line in self._lines.items():
            if not line.queue or line.underway or self._is_alone(job):
                continue
            first = line.queue[0].write
            if line.file_made is not first and self._lacks_file(first):
                return first
        return None

    def take_file(self) -> Write | None:
        """Returns the record whose file to create, if any. Its job is not committed until `file_made`."""
        if self._making_file is None:
            self._making_file = self.file_wanted
            return self._making_file
        return None

    def file_made(self, write: Write) -> None:
        self._making_file = None
        if write.job in self._lines:
            self._lines[write.job].file_made = write

    def next_batch(self) -> list[Queued]:
        """Removes the next commit's frames from the queue of the job whose turn it is, and returns them."""
        job = self._next()
        if job is None:
            return []
        line = self._lines[job]
        turn = ALONE if self._is_alone(job) else AMONG_OTHERS
        batch: list[Queued] = []
        streams: set[int] = set()
        size = 0
        while line.queue and size < turn.bytes and len(batch) < turn.records:
            queued = line.queue[0]
            another = bool(batch) and queued.stream.tag not in streams
            if another and (
                len(streams) == turn.streams or (turn is AMONG_OTHERS and self._lacks_file(queued.write))
            ):
                break
            streams.add(queued.stream.tag)
            batch.append(line.queue.popleft())
            size += queued.write.size
        return batch

    def sync_due(self, batch: list[Queued], now: float) -> bool:
        if any(queued.fsync is Fsync.ALWAYS for queued in batch) or self._sync_is_asked_for:
            return True
        return self.next_sync_s(now) == 0

    def next_sync_s(self, now: float) -> float | None:
        """Returns the seconds until unsynced records must be synced; None if there are none."""
        if self._unsynced_since is None:
            return None
        return max(0.0, self._unsynced_since + self._state.config.fsync_interval_s - now)

    def committed(
        self, batch: list[Queued], sync: bool, now: float, unmended: Sequence[Write] = ()
    ) -> list[Notice]:
        """Records that the storage has written the batch, except for ``unmended``. Returns the events to emit: space is
        free again, and which records were mended."""
        self._leave(batch)
        if batch:  # its turn is over: it goes after all that have come meanwhile
            job = batch[0].stream.job
            self._lines[job] = self._lines.pop(job)
        if sync:
            self._unsynced_since = None
            self._is_synced()
        elif self._unsynced_since is None and any(queued.fsync is Fsync.INTERVAL for queued in batch):
            self._unsynced_since = now
        news = self._mended([queued for queued in batch if queued.write.mends], unmended)
        self._acknowledge(batch)
        self._forget_those_over()
        return [*news, *(self._state.space.disk_took() if batch else [])]

    def _leave(self, batch: Iterable[Queued]) -> None:
        for queued in batch:
            self._lines[queued.stream.job].settled += 1

    def _is_synced(self) -> None:
        for line in self._lines.values():
            line.synced = line.settled

    def _forget_those_over(self) -> None:
        for job in [job for job, line in self._lines.items() if line.over]:
            del self._lines[job]

    def _mended(self, batch: list[Queued], unmended: Sequence[Write]) -> list[Notice]:
        news = []
        for queued in batch:
            stream, sequence = queued.stream, queued.write.sequence
            if queued.write in unmended:
                stream.mending.pop(sequence, None)
                refusal = cannot_be_mended(stream, sequence)
                queued.session.end(refusal)
                self._state.send_again(stream, sequence, refusal)
                continue
            self._state.space.added(stream.job, self._state.core.mended(stream, sequence))
            news.append(Notice("mended", {"job": stream.job, "stream": stream.name, "sequence": sequence}))
        return news

    def _acknowledge(self, batch: list[Queued]) -> None:
        durable: dict[int, StreamState] = {}
        credit: dict[AppendCall, int] = {}
        for queued in batch:
            if not queued.write.mends:
                self._state.core.made_durable(queued.stream, queued.write.sequence + 1)
            durable[queued.stream.tag] = queued.stream
            credit[queued.session] = credit.get(queued.session, 0) + queued.write.size
        for tag, stream in durable.items():
            holder = self._state.holders.get(tag)
            if holder is not None:
                holder.acknowledge(stream)
        for queued in batch:
            queued.session.queued_records -= 1
        for session, size in credit.items():
            session.underway_bytes -= size
            session.outbox.put(log_pb2.AppendReply(credit_bytes=size))

    def gave_up(self, error: StorageError | BodyChanged, batch: list[Queued], now: float) -> list[Notice]:
        """The batch and all queued after it was not written: their sessions end, so writers resend. A changed body
        concerns only the job whose writer it is."""
        state = self._state
        only = batch[0].stream.job if isinstance(error, BodyChanged) else None
        if isinstance(error, StorageFull):
            news = state.space.disk_is_full(str(error), now)
        elif isinstance(error, StorageBusy):
            news = [Notice("storage_busy", {"reason": str(error)})]
        elif isinstance(error, JobDamaged):
            news = [state.set_apart(error.job, str(error))]
        elif isinstance(error, BodyChanged):
            news = []
        else:
            state.failed = str(error)
            news = [Notice("storage_failed", {"reason": str(error)})]
        state.core.abandon(only)
        state.space.recount(state.core)
        self._leave(batch)
        for job, line in self._lines.items():
            if only in (None, job):
                self._leave(line.queue)
                line.queue.clear()
        if state.failed:  # no sync is tried any more
            self._unsynced_since = None
            self._is_synced()
        self._forget_those_over()
        state.end_sessions(refusal_of(error), only)
        return news


def refusal_of(error: StorageError | BodyChanged) -> Refusal:
    if isinstance(error, BodyChanged):
        return Refusal(Reason.CORRUPT, str(error))
    if isinstance(error, StorageFull):
        return Refusal(Reason.FULL, str(error))
    if isinstance(error, StorageBusy | JobDamaged):
        return Refusal(Reason.BUSY, str(error))
    return Refusal(Reason.CLOSED, str(error))


Frame = tuple[FrameHeader, Sequence[Part]]
"""A header, and the bytes of the frame in pieces."""


class Gathered:
    """Replies that are sent together. Of each stream only the newest value is kept, so a writer that does not read its
    acknowledgements costs no more memory than one that does."""

    def __init__(self) -> None:
        self.empty = True
        self._welcome: log_pb2.Welcome | None = None
        self._opened: dict[str, int] = {}
        self._acked: dict[str, int] = {}
        self._credit_bytes = 0

    def add(self, reply: log_pb2.AppendReply) -> None:
        self.empty = False
        self._credit_bytes += reply.credit_bytes
        for opened in reply.opened:
            self._opened[opened.stream] = opened.next_sequence
        for acked in reply.acked:
            self._acked[acked.stream] = acked.durable_sequence
        if reply.HasField("welcome"):
            self._welcome = reply.welcome

    def drain(self) -> log_pb2.AppendReply:
        reply = log_pb2.AppendReply(credit_bytes=self._credit_bytes, welcome=self._welcome)
        for stream, next_sequence in self._opened.items():
            reply.opened.add(stream=stream, next_sequence=next_sequence)
        for stream, durable_sequence in self._acked.items():
            reply.acked.add(stream=stream, durable_sequence=durable_sequence)
        self.empty, self._welcome, self._credit_bytes = True, None, 0
        self._opened.clear()
        self._acked.clear()
        return reply


class Quarantined(Refused):
    """The stream was quarantined by this frame; its manifest must be saved."""

    def __init__(self, refusal: Refusal, stream: StreamState) -> None:
        super().__init__(*refusal)
        self.stream = stream


class Appends:
    """Which call writes which stream. (All methods but `parse` are called while holding the server's lock.)"""

    def __init__(self, state: ServerState, commits: Commits) -> None:
        self._state = state
        self._commits = commits

    def take_over(self, recovered: RecoveredJob, now: float) -> None:
        job = self._state.core.jobs[recovered.name] = recovered.state
        job.generation = recovered.meta.generation
        job.reset_generation = recovered.meta.reset_generation
        job.reset_number = recovered.meta.reset_number
        job.trimmed_below_step = job.trim_wanted = job.trim_recorded = recovered.meta.trimmed_below_step
        for stream in recovered.streams:
            stream.holes = [hole for hole in stream.holes if hole.below_step > job.trimmed_below_step]
            stream.check()
            self._state.space.added(job.name, stream.bytes - stream.cold_bytes)
        self._state.touch(job.name, now)

    def attach(self, session: AppendCall) -> None:
        """Registers a writer's call: sends the welcome and the first credit."""
        config = self._state.config
        self._state.check_open()
        self._state.sessions[session] = None
        session.outbox.put(
            log_pb2.AppendReply(
                welcome=log_pb2.Welcome(
                    body_bytes_max=config.body_bytes_max,
                    memory_socket=self._state.memory_socket,
                    memory_key=session.memory_key,
                ),
                credit_bytes=config.credit_bytes,
            )
        )

    def detach(self, session: AppendCall) -> None:
        """Removes a call that has ended: its streams may be opened by another one."""
        session.end()
        self._state.sessions.pop(session, None)
        for job in session.oldest:
            writers = self._state.writers.get(job, {})
            writers.pop(session, None)
            if not writers:
                self._state.writers.pop(job, None)
        for tag in session.streams:
            if self._state.holders.get(tag) is session:
                del self._state.holders[tag]

    def open(self, session: AppendCall, request: log_pb2.Open, now: float) -> None:
        """Opens a stream for writing by this call. If it raises Refused, nothing has changed."""
        check_names(request.job, request.stream)
        self._state.check_apart(request.job)
        try:
            fsync = Fsync(request.fsync or self._state.config.fsync)
        except ValueError:
            message = f"fsync {request.fsync!r} is not known; there are {', '.join(Fsync)}"
            raise Refused(Reason.INVALID, message) from None
        self._state.check_open()
        self._state.check_not_cut_off(request.job)
        self._state.check_room(request.job, 0)
        _check_session(session)
        self._state.check_writer(session, request.job, request.stream)
        self._state.touch(request.job, now)
        stream = self._state.core.open(
            request.job, request.stream, request.generation, request.acked_sequence
        )
        self._state.space.job(request.job)  # creates its account
        session.streams[stream.tag] = (stream, request.generation)
        oldest = session.oldest.get(request.job, request.generation)
        session.oldest[request.job] = min(oldest, request.generation)
        self._state.writers.setdefault(request.job, {})[session] = None
        session.fsync[stream.tag] = fsync
        self._state.holders[stream.tag] = session
        # No acknowledgement yet: the writer resends unacknowledged records, and they are compared.
        opened = log_pb2.Opened(stream=stream.name, next_sequence=stream.appended)
        session.outbox.put(log_pb2.AppendReply(opened=[opened]))

    @classmethod
    def parse(cls, session: AppendCall, frames: memoryview | None, shared: bytes = b"") -> list[Frame]:
        """Returns the frames that a message completes. None: no more messages will come. Raises Refused."""
        return [frame for some in cls.parse_some(session, frames, shared, 1 << 30) for frame in some]

    @staticmethod
    def parse_some(
        session: AppendCall, frames: memoryview | None, shared: bytes, count: int
    ) -> Iterator[list[Frame]]:
        """Yields the frames in lists of at most ``count``, verified but for bodies in shared memory. Raises Refused for
        damaged, too large or unexpected ones."""
        if frames is not None and not session.streams:  # an incomplete frame takes memory
            raise Refused(Reason.NOT_OPEN, "frames before any stream is open in this call")
        try:
            if frames is None:
                session.assembler.finish()
                return
            fed = chain(session.assembler.feed(frames), _in_memory(session, memoryview(shared)))
            while some := list(islice(fed, count)):
                yield some
        except RecordCorrupt as error:
            raise Refused(Reason.CORRUPT, f"damaged on the way here: {error}") from None
        except FrameOversize as error:
            raise Refused(Reason.OVERSIZE, str(error)) from None
        except LogError as error:
            raise Refused(Reason.INVALID, str(error)) from None

    def accept(self, session: AppendCall, parsed: list[Frame]) -> None:
        """Accepts frames of opened streams. Raises Refused; frames before the refused one are kept."""
        given_back = 0
        try:
            for header, frame in parsed:
                given_back += self._accept(session, header, frame)
        finally:
            if given_back:
                session.outbox.put(log_pb2.AppendReply(credit_bytes=given_back))

    def _accept(self, session: AppendCall, header: FrameHeader, frame: Sequence[Part]) -> int:
        """Queues a frame. Returns the credit to give back at once."""
        self._state.check_open()
        _check_session(session)
        opened = session.streams.get(header.stream_tag)
        if opened is None or self._state.holders.get(header.stream_tag) is not session:
            raise Refused(Reason.NOT_OPEN, f"{header.key}: its stream is not open in this call")
        stream, generation = opened
        if session.underway_bytes + header.frame_bytes > self._state.config.writer_bytes_max:
            raise Refused(Reason.INVALID, "more bytes under way than were granted")
        session.acked.setdefault(stream.tag, header.sequence)
        if header.sequence == stream.appended:
            self._state.check_room(stream.job, header.frame_bytes)
            self._state.check_records(self._state.core.known(stream.job))
        try:
            entry = self._state.core.append(stream, generation, header)
        except Refused as refused:
            if stream.quarantined:
                raise Quarantined(refused.refusal, stream) from None
            raise
        if entry is None:
            session.acknowledge(stream)
            return header.frame_bytes
        mends = stream.mending.get(header.sequence) is entry
        if not mends:
            self._state.space.added(stream.job, header.frame_bytes)
        session.underway_bytes += header.frame_bytes
        session.queued_records += 1
        write = Write(stream.job, stream.name, header.sequence, frame, mends)
        self._commits.put(session, stream, write, session.fsync[stream.tag])
        return 0


def _in_memory(session: AppendCall, shared: memoryview) -> Iterator[Frame]:
    """Yields the frames whose bodies lie in the writer's memory. Raises LogError."""
    if shared:
        session.assembler.finish()
    while shared:
        if session.memory is None:
            raise RecordInvalid("bodies in a memory, and none was handed over for this call")
        header = decode_header(shared, 0, session.assembler.body_bytes_max)
        head, place = shared[: header.header_bytes], shared[header.header_bytes :][: PLACE.size]
        if len(place) < PLACE.size:
            raise RecordInvalid(f"{header.key}: nothing says where its body is")
        yield header, [head, SharedBody(header, session.memory, *PLACE.unpack(place))]
        shared = shared[len(head) + len(place) :]


def _check_session(session: AppendCall) -> None:
    if session.ended:
        raise Refused(*(session.refusal or Refusal(Reason.CLOSED, "the call has ended")))
