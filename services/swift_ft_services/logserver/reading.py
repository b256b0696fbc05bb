"""The reading side: records of a stream in log order, its digests, the inventory."""

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

# What all readers together may take to read ahead. The first get as much as they can use, many get less each.

BUDGET_BYTES = 64 << 20
"""Of messages. A reader that does not take its answers holds five times its message: it is read ahead, on its way."""
LEAST_BYTES = 64 << 10
"""That anybody gets, also when nothing is left."""
_PART = 16


class ReadMemory:
    """Thread-safe."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._left = budget_bytes
        self._lock = threading.Lock()

    @contextmanager
    def message_bytes(self) -> Iterator[int]:
        """For one reader, as long as it reads: how large its messages may be. Each takes a part of what is left, so
        there is always some left for the next one."""
        with self._lock:
            mine = min(MESSAGE_BYTES, self._left // _PART)
            self._left -= mine
        try:
            yield max(mine, LEAST_BYTES)
        finally:
            with self._lock:
                self._left += mine


# Reading ahead of a reader: threads read the next messages while the last one is verified and sent. All readers share
# these threads, so that a reader costs no thread but that of its call.
#
# Call sequence of one Read call::
#
#     (handler)   add(record)…, flush()       what is wanted next, in log order
#     (threads)   storage.read into page-aligned memory
#     (handler)   take()                      checksums, one join: a message; in order
#
# Records that follow each other in a file are read at once, up to a message; a large record is read, and travels, in
# several messages.

_AHEAD = 2
_DAMAGED = {
    *(errno.EIO, errno.EBADMSG, errno.EUCLEAN),
    *(errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO),
}
"""The disk, or a file system's checksum, says that the bytes are lost; or the file is not there, or something else is
in its place. Anything else is the server's own trouble."""
_ANY_BODY_BYTES = 1 << 62  # of what was accepted once, whatever the limit is today


@dataclass(frozen=True, slots=True)
class Wanted:
    """A record that a reader gets."""

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
    """Why a record cannot be sent."""

    wanted: Wanted
    reason: str
    kind: Reason = Reason.CORRUPT
    """TRIMMED: it was dropped meanwhile; BUSY: nobody can tell now."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one message has: whole frames that follow each other, or a piece of one frame."""

    frames: tuple[Wanted, ...]
    begin: int
    """Of the first frame."""
    size: int


@dataclass(slots=True)
class _Begun:
    """The frame whose pieces are under way."""

    header: FrameHeader
    crc: int


class ReadAhead:
    """For one reader. A context manager."""

    def __init__(self, storage: Storage, memory: ReadMemory, threads: Threads) -> None:
        self._storage = storage
        self._memory = memory
        self._threads = threads
        self._held = ExitStack()
        self._message_bytes = 0  # until something is wanted
        self._run: list[Wanted] = []
        self._run_bytes = 0
        self._waiting: deque[_Part] = deque()
        self._reading: deque[tuple[_Part, futures.Future[memoryview]]] = deque()
        self._begun: _Begun | None = None
        # One more than is read ahead: the oldest is being sent.
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
        """The record is wanted next. A large one is read in several parts of equal size."""
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
        """Reads what was added."""
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
            self._threads.ready()  # if not, one that is there gets to it
            self._reading.append((part, self._threads.submit(self._read, part, buffer)))

    def _read(self, part: _Part, buffer: memoryview) -> memoryview:
        """(a thread) A run that goes on in the next file is read up to there."""
        first = part.frames[0]
        place = self._storage.locate(first.stream.job, first.stream.name, first.sequence)
        size = part.size
        if len(part.frames) > 1:
            size = sum(frame.frame_bytes for frame in part.frames if frame.sequence < place.end_sequence)
        return self._storage.read(place.behind(part.begin), size, buffer)

    def next_message(self) -> tuple[bytes, Damage | None]:
        """The next message (or none), and what is wrong with the record behind it. Waits for the disk."""
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
        """(bytes that are sound, what is wrong behind them)."""
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
        """Comes before what is under way, which is read again behind it."""
        self._waiting.extendleft(reversed([part, *(other for other, _ in self._reading)]))
        self._call_off()

    def _call_off(self) -> None:
        """What is under way. Its buffers are free when this returns."""
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
    """The one that the index means: files can be put in place of others while the server runs, and they are sound."""
    header, entry = decode_header(frame, 0, _ANY_BODY_BYTES), wanted.entry
    is_there = (header.stream_tag, header.sequence, header.key, header.generation, header.frame_bytes)
    is_meant = (wanted.stream.tag, entry.sequence, entry.key, entry.generation, entry.frame_bytes)
    if is_there != is_meant or header.digest != entry.digest:
        raise RecordCorrupt("another record is in its place")
    return header


_POLL_S = 0.5
_READ_AHEAD_THREADS = 8
_LOOKED_AT_ONCE = 500
"""Records that are looked at before others get the lock: a reader of a small share passes many."""
_STREAMS_AT_ONCE = 50
"""... and streams of an inventory."""
_TRIES = 3
_OTHERS_TURN_S = 0.002


class Turns:
    """Of each job one at a time. Thread-safe."""

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
    """Serves what is durable, and verifies each record as it leaves."""

    def __init__(
        self, state: ServerState, administration: Administration, clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._clock = clock
        self._administration = administration
        self._changed = state.changed
        self._reader_ids = iter(range(1 << 62))
        self._inventories = Turns()
        """Whoever asks for many of one job at once has one thread's share of the processor, not many threads'."""
        self._memory = ReadMemory()
        self._threads = Threads(_READ_AHEAD_THREADS, "read-ahead")

    def wake(self, job: str) -> None:
        """A call of this job has ended: `read` looks whether it is its own."""
        with self._changed:
            self._state.wake_readers([job])

    def read(self, request: log_pb2.ReadRequest, alive: Callable[[], bool]) -> Iterator[bytes]:
        """Encoded ReadReplies. Holds a lease on the steps from ``from_step`` on: a trim waits for it. Raises Refused
        for steps that are trimmed, too many readers, and for want of memory."""
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
        """(holding ``changed``) For what comes next. Raises Refused if nothing will."""
        if self._state.draining:
            self._state.check_open()
        self._state.news(job).wait(_POLL_S)

    def _take(self, ahead: ReadAhead) -> Iterator[bytes]:
        """The oldest message that was read ahead."""
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
        """The next records to read, the sequence behind them, and what ends the call after them."""
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
        """Of what is durable when it begins, in log order. Raises Refused for steps that are trimmed or damaged."""
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
        """What is durable of each stream of a job. Raises Refused: names that are none."""
        check_names(job_name)
        with self._inventories.turn(job_name):
            for _ in range(_TRIES):
                reply = self._inventory(job_name, _STREAMS_AT_ONCE)
                if reply is not None:
                    return reply
            reply = self._inventory(job_name, None)
            assert reply is not None
            return reply

    def _inventory(self, job_name: str, at_once: int | None) -> log_pb2.InventoryReply | None:
        """A few streams at a time, so that others can append meanwhile. None: the job was trimmed or emptied, or got
        another generation, meanwhile."""
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
            if at_once is None:
                reply.streams.extend(_stream_inventory(job, job.streams[name]) for name in names)
                return reply
        for at in range(0, len(names), at_once):
            with self._changed:
                if self._state.core.jobs.get(job_name) is not job or _age_of(job) != before:
                    return None
                reply.streams.extend(
                    _stream_inventory(job, job.streams[name]) for name in names[at : at + at_once]
                )
            rest()
        return reply

    def status(self, request: log_pb2.StatusRequest) -> log_pb2.StatusReply:
        """Space, and what is known of one job or of all. Raises Refused: a name that is none."""
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
