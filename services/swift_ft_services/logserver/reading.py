"""Read calls of the log server: records of a stream in log order, its digests, the inventory."""

import errno
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import crc32c

from swift_ft import events
from swift_ft._pb import log_pb2
from swift_ft.errors import LogError, RecordCorrupt
from swift_ft.log.frame import HEADER_BYTES_MAX, MESSAGE_BYTES, FrameHeader, check_body, decode_header
from swift_ft.log.memory import page_aligned
from swift_ft.log.protocol import Reason, frames_message
from swift_ft.log.reader import ReadFilter
from swift_ft.log.segment import BLOCK_BYTES
from swift_ft_services.logserver.administration import Administration, rest
from swift_ft_services.logserver.core import Hole, IndexEntry, JobState, Refusal, StreamState
from swift_ft_services.logserver.quotas import Account, Alarm
from swift_ft_services.logserver.state import Refused, ServerState, check_names
from swift_ft_services.logserver.storage_interface import Storage
from swift_ft_services.threads import Threads

# Memory that all readers share for reading ahead. The first readers get all they can use; with many, each gets less.

BUDGET_BYTES = 64 << 20
"""Budget, in bytes of messages. A reader that does not take its answers holds five times its message: read ahead, and
in flight."""
LEAST_BYTES = 64 << 10
"""Message size that every reader gets, even if the budget is used up."""
_PART = 16


class ReadMemory:
    """Budget for the readers' message buffers. Thread-safe."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._left = budget_bytes
        self._lock = threading.Lock()

    @contextmanager
    def message_bytes(self) -> Iterator[int]:
        """Yields how large one reader's messages may be, reserved as long as it reads. Each reader takes a fraction of
        the rest, so some is always left for the next one."""
        with self._lock:
            mine = min(MESSAGE_BYTES, self._left // _PART)
            self._left -= mine
        try:
            yield max(mine, LEAST_BYTES)
        finally:
            with self._lock:
                self._left += mine


# Read-ahead: threads read the next messages while the last one is verified and sent. All readers share these threads,
# so a reader costs only the thread of its call.
#
# Call sequence of one Read call::
#
#     (handler)   add(record)…, flush()       records wanted next, in log order
#     (threads)   storage.read into page-aligned memory
#     (handler)   next_message()              checksums, one join: a message; in order
#
# Consecutive records of a file are read together, up to a message. A large record is read and sent in several messages.

_AHEAD = 2
_DAMAGED = {
    *(errno.EIO, errno.EBADMSG, errno.EUCLEAN),
    *(errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO),
}
"""Errors of a read that mean that the record is lost: reported by the disk or by a file system's checksum, or the file
is missing or replaced. Any other error is the server's own and temporary."""
_ANY_BODY_BYTES = 1 << 62  # no limit: the record was accepted under the limit of its time


@dataclass(frozen=True, slots=True)
class Wanted:
    """A record to be sent to a reader."""

    stream: StreamState
    entry: IndexEntry

    @property
    def sequence(self) -> int:
        return self.entry.sequence

    @property
    def frame_bytes(self) -> int:
        return self.entry.frame_bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Reason why a record cannot be sent."""

    wanted: Wanted
    reason: str
    kind: Reason = Reason.CORRUPT
    """TRIMMED: it was dropped meanwhile; BUSY: it cannot be read at the moment."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Content of one message: consecutive whole frames, or a piece of one frame."""

    frames: tuple[Wanted, ...]
    begin: int
    """Offset within the first frame."""
    size: int


@dataclass(slots=True)
class _Begun:
    """The large frame whose pieces are being sent."""

    header: FrameHeader
    crc: int


class ReadAhead:
    """Read-ahead of one reader. A context manager."""

    def __init__(self, storage: Storage, memory: ReadMemory, threads: Threads) -> None:
        self._storage = storage
        self._memory = memory
        self._threads = threads
        self._held = ExitStack()
        self._message_bytes = 0  # 0 until a record is wanted
        self._run: list[Wanted] = []
        self._run_bytes = 0
        self._waiting: deque[_Part] = deque()
        self._reading: deque[tuple[_Part, futures.Future[memoryview]]] = deque()
        self._begun: _Begun | None = None
        # One buffer more than is read ahead: the oldest message is being sent.
        self._buffers: deque[memoryview] = deque()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._call_off()
        self._held.close()

    @property
    def is_empty(self) -> bool:
        return not self._reading and not self._waiting

    @property
    def is_full(self) -> bool:
        return len(self._reading) >= _AHEAD

    def add(self, wanted: Wanted) -> None:
        """Queues the record to be read next. A large one is split into several parts of equal size."""
        if not self._message_bytes:
            self._message_bytes = self._held.enter_context(self._memory.message_bytes())
        part_bytes = self._message_bytes + HEADER_BYTES_MAX
        if self._run_bytes + wanted.frame_bytes > part_bytes or (
            self._run and wanted.sequence != self._run[-1].sequence + 1
        ):
            self.flush()
        if wanted.frame_bytes <= part_bytes:
            self._run.append(wanted)
            self._run_bytes += wanted.frame_bytes
            return
        count = -(-wanted.frame_bytes // self._message_bytes)
        each = -(-wanted.frame_bytes // count)
        for begin in range(0, wanted.frame_bytes, each):
            self._waiting.append(_Part((wanted,), begin, min(each, wanted.frame_bytes - begin)))

    def flush(self) -> None:
        """Starts reading the records that were added."""
        if self._run:
            self._waiting.append(_Part(tuple(self._run), 0, self._run_bytes))
            self._run, self._run_bytes = [], 0
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and not self._buffers:
            size = (self._message_bytes + HEADER_BYTES_MAX) // BLOCK_BYTES * BLOCK_BYTES + 3 * BLOCK_BYTES
            self._buffers.extend(memoryview(page_aligned(size)) for _ in range(_AHEAD + 1))
        while self._waiting and len(self._reading) < _AHEAD:
            part = self._waiting.popleft()
            buffer = self._buffers[0]
            self._buffers.rotate(-1)
            self._threads.ready()  # starts a thread if needed; if it cannot, an existing one does the work
            self._reading.append((part, self._threads.submit(self._read, part, buffer)))

    def _read(self, part: _Part, buffer: memoryview) -> memoryview:
        """(a read-ahead thread) Reads a part. A run that continues in the next file is read up to the end of this
        file."""
        first = part.frames[0]
        place = self._storage.locate(first.stream.job, first.stream.name, first.sequence)
        size = part.size
        if len(part.frames) > 1:
            size = sum(frame.frame_bytes for frame in part.frames if frame.sequence < place.end_sequence)
        return self._storage.read(place.behind(part.begin), size, buffer)

    def next_message(self) -> tuple[bytes, Damage | None]:
        """Returns the next message (or none), and the damage that follows it, if any. Waits for the disk."""
        part, future = self._reading.popleft()
        try:
            view = future.result()
        except OSError as error:
            return b"", _unreadable(part.frames[0], error)
        is_piece = part.size < part.frames[0].frame_bytes
        good, damage = self._piece(part, view) if is_piece else self._frames(part, view)
        message = frames_message([view[:good]], good) if good else b""
        self._go_on()
        return message, damage

    def _frames(self, part: _Part, view: memoryview) -> tuple[int, Damage | None]:
        """Returns the count of valid bytes, and the damage after them, if any."""
        at = 0
        for index, wanted in enumerate(part.frames):
            if index and at == len(view):  # the rest is in the next file
                rest = part.frames[index:]
                self._again(_Part(rest, 0, sum(frame.frame_bytes for frame in rest)))
                return at, None
            frame = view[at : at + wanted.frame_bytes]
            try:
                header = _header(frame, wanted)
                check_body(header, frame[header.header_bytes :])
            except LogError as error:
                return at, Damage(wanted, str(error))
            at += wanted.frame_bytes
        return at, None

    def _again(self, part: _Part) -> None:
        """Puts the part before those being read, which are read again after it."""
        self._waiting.extendleft(reversed([part, *(other for other, _ in self._reading)]))
        self._call_off()

    def _call_off(self) -> None:
        """Cancels the reads in flight. When this returns, their buffers are free."""
        for _, future in self._reading:
            future.cancel()
        futures.wait([future for _, future in self._reading])
        self._reading.clear()

    def _piece(self, part: _Part, view: memoryview) -> tuple[int, Damage | None]:
        wanted = part.frames[0]
        try:
            if part.begin == 0:
                self._begun = _Begun(_header(view, wanted), 0)
            begun = self._begun
            assert begun is not None
            if len(view) < part.size:
                raise RecordCorrupt("its file is too short")
            begun.crc = crc32c.crc32c(view[begun.header.header_bytes if part.begin == 0 else 0 :], begun.crc)
            if part.begin + part.size == wanted.frame_bytes and begun.crc != begun.header.body_crc:
                raise RecordCorrupt(f"{begun.header.key}: its body's checksum does not match")
        except LogError as error:
            return 0, Damage(wanted, str(error))
        return len(view), None


def _unreadable(wanted: Wanted, error: OSError) -> Damage:
    if error.errno in _DAMAGED:
        return Damage(wanted, f"it cannot be read: {error.strerror}")
    reason = f"record {wanted.sequence} of {wanted.stream.name} cannot be read now: {error.strerror}"
    return Damage(wanted, reason, Reason.BUSY)


def _header(frame: memoryview, wanted: Wanted) -> FrameHeader:
    """Decodes the header and checks that it is the indexed record's: the file may have been replaced."""
    header, entry = decode_header(frame, 0, _ANY_BODY_BYTES), wanted.entry
    is_there = (header.stream_tag, header.sequence, header.key, header.generation, header.frame_bytes)
    is_meant = (wanted.stream.tag, entry.sequence, entry.key, entry.generation, entry.frame_bytes)
    if is_there != is_meant or header.digest != entry.digest:
        raise RecordCorrupt("another record is in its place")
    return header


_POLL_S = 0.5
_READ_AHEAD_THREADS = 8
_LOOKED_AT_ONCE = 500
"""Index entries that are examined before the lock is released: a reader of a small share skips many."""
_STREAMS_AT_ONCE = 50
"""Streams of an inventory that are examined before the lock is released."""
_OTHERS_TURN_S = 0.002


class Turns:
    """Mutual exclusion per job. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, threading.Lock] = {}
        self._there: Counter[str] = Counter()

    @contextmanager
    def turn(self, job: str) -> Iterator[None]:
        """(context manager) Waits for this job's turn."""
        with self._lock:
            self._there[job] += 1
            of = self._of.setdefault(job, threading.Lock())
        try:
            with of:
                yield
        finally:
            with self._lock:
                self._there[job] -= 1
                if not self._there[job]:
                    del self._there[job], self._of[job]


class Reading:
    """Serves durable records, and verifies each one before it is sent."""

    def __init__(
        self, state: ServerState, administration: Administration, clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._clock = clock
        self._administration = administration
        self._changed = state.changed
        self._reader_ids = iter(range(1 << 62))
        self._inventories = Turns()
        """Serializes inventories per job, so that concurrent requests for one job use one thread's share of the
        processor."""
        self._memory = ReadMemory()
        self._threads = Threads(_READ_AHEAD_THREADS, "read-ahead")

    def wake(self, job: str) -> None:
        """Wakes the readers of the job, so that one whose call has ended notices it."""
        with self._changed:
            self._state.wake_readers([job])

    def read(self, request: log_pb2.ReadRequest, alive: Callable[[], bool]) -> Iterator[bytes]:
        """Yields encoded ReadReplies. Holds a lease on the steps >= ``from_step``: a trim waits for it. Raises Refused
        for trimmed steps, for too many readers, and if memory is short."""
        check_names(request.job, request.stream)
        with self._changed:
            self._state.check_apart(request.job)
            while (job := self._state.core.jobs.get(request.job)) is None:
                if not request.follow or not alive():
                    return
                self._wait(request.job)
            refusal = self._state.core.check_readable(job, request.from_step)
            if refusal is not None:
                raise Refused(refusal)
            if len(job.readers) >= self._state.config.job_readers_max:
                message = (
                    f"{len(job.readers)} streams of the job are read already: no more (--job-readers-max)"
                )
                raise Refused(Refusal(Reason.LIMIT, message))
            self._state.touch(request.job, self._clock())
            reader = next(self._reader_ids)
            job.readers[reader] = request.from_step
        try:
            yield from self._follow(job, request, alive)
        except OSError as error:  # no memory to read into
            raise Refused(Refusal(Reason.BUSY, f"cannot read now: {error.strerror}")) from None
        finally:
            with self._changed:
                del job.readers[reader]
                self._state.touch(request.job, self._clock())
                held_up = job.trim_wanted > job.trimmed_below_step
            if held_up:
                self._administration.trim_later(job)

    def _follow(
        self, job: JobState, request: log_pb2.ReadRequest, alive: Callable[[], bool]
    ) -> Iterator[bytes]:
        with ReadAhead(self._state.storage, self._memory, self._threads) as ahead:
            sequence = request.from_sequence
            while alive():
                with self._changed:
                    self._state.check_apart(job.name)
                    before = sequence
                    run, sequence, refusal = self._plan_read(job, request, sequence)
                    if not run and sequence == before and ahead.is_empty and refusal is None:
                        if not request.follow:
                            return
                        self._wait(request.job)
                        continue
                for entry in run:
                    ahead.add(entry)
                ahead.flush()
                while not ahead.is_empty and (refusal is not None or not run or ahead.is_full):
                    yield from self._take(ahead)
                if refusal is not None:
                    raise Refused(refusal)

    def _wait(self, job: str) -> None:
        """(holding ``changed``) Waits for new records. Raises Refused if the server is draining."""
        if self._state.draining:
            self._state.check_open()
        self._state.news(job).wait(_POLL_S)

    def _take(self, ahead: ReadAhead) -> Iterator[bytes]:
        """Yields the oldest message that was read ahead. Raises Refused for a damaged record."""
        message, damage = ahead.next_message()
        if message:
            yield message
        if damage is not None:
            if damage.kind is not Reason.CORRUPT:
                raise Refused(Refusal(damage.kind, damage.reason))
            raise Refused(self._found_damage(damage))

    def _plan_read(
        self, job: JobState, request: log_pb2.ReadRequest, sequence: int
    ) -> tuple[list[Wanted], int, Refusal | None]:
        """Returns the records to read next, the sequence after them, and the refusal that ends the call after them, if
        any."""
        if self._state.core.jobs.get(job.name) is not job:
            return [], sequence, Refusal(Reason.TRIMMED, f"job {job.name} was dropped while it was read")
        plan: list[Wanted] = []
        stream = job.streams.get(request.stream)
        if stream is None:
            return plan, sequence, None
        share = _share_of(request)
        entries, behind, refusal = self._state.core.durable_records(
            stream, sequence, request.from_step, _LOOKED_AT_ONCE
        )
        size = 0
        for entry in entries:
            if size >= MESSAGE_BYTES:
                return plan, entry.sequence, None
            if share is None or share.has(entry.key):
                plan.append(Wanted(stream, entry))
                size += entry.frame_bytes
        return plan, behind, refusal

    def _found_damage(self, damage: Damage) -> Refusal:
        stream, entry, sequence = damage.wanted.stream, damage.wanted.entry, damage.wanted.sequence
        reason = f"record {sequence} of {stream.name} {entry.key}: {damage.reason}"
        with self._changed:
            if sequence < stream.first:
                message = f"record {sequence} of {stream.name} was dropped while it was read"
                return Refusal(Reason.TRIMMED, message)
            if stream.by_sequence.get(sequence) is not entry:
                message = f"record {sequence} of {stream.name} was mended or dropped while it was read: read it again"
                return Refusal(Reason.BUSY, message)
            if stream.hole_at(sequence) is None:
                stream.insert_hole(Hole(sequence, sequence + 1, entry.key.step + 1, reason))
                self._state.send_again(stream, sequence, Refusal(Reason.CORRUPT, reason))
                self._state.wake_readers([stream.job])
        events.emit("stream_corrupt", job=stream.job, stream=stream.name, reason=reason)
        return Refusal(Reason.CORRUPT, reason)

    def digests(self, request: log_pb2.DigestsRequest) -> Iterator[list[log_pb2.RecordDigest]]:
        """Yields digests of the records that are durable at the start, in log order. Raises Refused for trimmed or
        damaged steps."""
        check_names(request.job, request.stream)
        sequence = end = 0
        while True:
            with self._changed:
                self._state.check_apart(request.job)
                job = self._state.core.known(request.job)
                refusal = self._state.core.check_readable(job, request.from_step)
                stream = job.streams.get(request.stream)
                if refusal is None and stream is not None:
                    hole = stream.hole_in(stream.first, stream.durable, request.from_step)
                    if hole is not None:
                        refusal = Refusal(Reason.CORRUPT, f"{stream.name}: {hole.reason}")
                if refusal is not None:
                    raise Refused(refusal)
                if stream is None:
                    return
                end = end or stream.durable
                numbers = stream.order.some(sequence, _LOOKED_AT_ONCE)
                entries = [stream.by_sequence[number] for number in numbers if number < end]
            if not entries:
                return
            sequence = entries[-1].sequence + 1
            yield [_digest(entry) for entry in entries if entry.key.step >= request.from_step]
            rest(_OTHERS_TURN_S if len(self._state.writers) > 1 else None)

    def inventory(self, job_name: str) -> log_pb2.InventoryReply:
        """Returns the records and watermarks of each stream of a job. Raises Refused for an invalid name."""
        check_names(job_name)
        with self._inventories.turn(job_name):
            while (reply := self._inventory(job_name)) is None:
                pass
            return reply

    def _inventory(self, job_name: str) -> log_pb2.InventoryReply | None:
        """Collects some streams per lock acquisition, so that others can append meanwhile. Returns None if the job was
        trimmed, reset, dropped or fenced meanwhile."""
        with self._changed:
            self._state.check_apart(job_name)
            job = self._state.core.jobs.get(job_name)
            if job is None:
                return log_pb2.InventoryReply()
            before = _age_of(job)
            reply = log_pb2.InventoryReply(
                generation=job.generation, trimmed_below_step=job.trimmed_below_step
            )
            names = sorted(job.streams)
        for at in range(0, len(names), _STREAMS_AT_ONCE):
            with self._changed:
                if self._state.core.jobs.get(job_name) is not job or _age_of(job) != before:
                    return None
                some = names[at : at + _STREAMS_AT_ONCE]
                reply.streams.extend(_stream_inventory(job, job.streams[name]) for name in some)
            rest()
        return reply

    def status(self, request: log_pb2.StatusRequest) -> log_pb2.StatusReply:
        """Returns the server's space, and the status of one job or of all. Raises Refused for an invalid name."""
        if request.job:
            check_names(request.job)
        with self._changed:
            state = self._state
            if request.job in state.core.jobs and request.generation:
                state.touch(request.job, self._clock())
            names = [request.job] if request.job else sorted(state.core.jobs)
            reply = log_pb2.StatusReply(
                space=_space(state.space.server, state.space.disk_reason),
                closed_reason=state.failed,
                jobs=[
                    log_pb2.JobStatus(job=name, apart=why)
                    for name, why in sorted(state.apart.items())
                    if request.job in ("", name)
                ],
                trimmed_bytes=state.space.trimmed_bytes,
            )
        for name in names:
            with self._changed:
                job = state.core.jobs.get(name)
                if job is not None and (job.generation or job.streams):
                    reply.jobs.append(self._job_status(job))
            if len(names) > 1:
                rest()
        return reply

    def _job_status(self, job: JobState) -> log_pb2.JobStatus:
        return log_pb2.JobStatus(
            job=job.name,
            generation=job.generation,
            trimmed_below_step=job.trimmed_below_step,
            space=_space(self._state.space.job(job.name), ""),
            records=job.tally.records,
            writers=self._state.writers_of(job),
            readers=len(job.readers),
            idle_seconds=self._state.idle_s(job.name, self._clock()) or 0.0,
            wants_checkpoint=self._state.wants_checkpoint(job),
        )


_ALARMS = {Alarm.NONE: log_pb2.NO_ALARM, Alarm.HIGH: log_pb2.HIGH, Alarm.FULL: log_pb2.FULL}


def _space(account: Account, disk_reason: str) -> log_pb2.Space:
    alarm = Alarm.FULL if disk_reason else account.alarm
    return log_pb2.Space(
        used_bytes=account.used_bytes,
        limit_bytes=account.limit_bytes,
        quota_bytes=account.quota_bytes,
        alarm=_ALARMS[alarm],
        reason=disk_reason or (account.words() if alarm else ""),
    )


def _age_of(job: JobState) -> tuple[int, ...]:
    return job.generation, job.trimmed_below_step, job.reset_generation, job.reset_number


def _digest(entry: IndexEntry) -> log_pb2.RecordDigest:
    key = entry.key
    return log_pb2.RecordDigest(step=key.step, microbatch=key.microbatch, slot=key.slot, digest=entry.digest)


def _stream_inventory(job: JobState, stream: StreamState) -> log_pb2.StreamInventory:
    steps = stream.steps_from(job.trimmed_below_step)
    unlogged = stream.unlogged
    return log_pb2.StreamInventory(
        stream=stream.name,
        records=len(stream.by_sequence),
        bytes=stream.bytes,
        has_records=steps is not None,
        first_step=0 if steps is None else steps.first,
        last_step=0 if steps is None else steps.last,
        next_sequence=stream.appended,
        durable_sequence=stream.durable,
        corrupt=bool(stream.corrupt_reason),
        reason=stream.corrupt_reason,
        first_sequence=stream.first,
        holes=[hole.reason for hole in stream.holes],
        quarantined=stream.quarantined,
        unlogged_from_step=None if unlogged is None else unlogged.first,
        unlogged_to_step=None if unlogged is None else unlogged.last,
        marks=len(stream.marks),
    )


def _share_of(request: log_pb2.ReadRequest) -> ReadFilter | None:
    if not request.HasField("share"):
        return None
    share = request.share
    return ReadFilter(first=share.first, behind=share.behind, of=share.of, below_step=share.below_step)
