"""Read calls of the log server: records of a stream in log order, sent or lent; its digests, the inventory."""

import errno
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from swift_ft import events
from swift_ft._pb import log_pb2
from swift_ft.errors import LogError, RecordCorrupt
from swift_ft.log.frame import HEADER_BYTES_MAX, MESSAGE_BYTES, Assembler, FrameHeader
from swift_ft.log.memory import page_aligned
from swift_ft.log.protocol import Reason, frames_message
from swift_ft.log.reader import ReadFilter
from swift_ft.log.segment import BLOCK_BYTES
from swift_ft.log.shared_memory import FILE, KEY_BYTES, KNOWN, TAKEN
from swift_ft_services.logserver.administration import Administration, rest
from swift_ft_services.logserver.core import Hole, IndexEntry, JobState, Refusal, Refused, StreamState
from swift_ft_services.logserver.quotas import Account, Alarm
from swift_ft_services.logserver.state import ServerState, check_names
from swift_ft_services.logserver.storage_interface import Place, Storage
from swift_ft_services.threads import Threads


@dataclass(slots=True)
class Run:
    """Frames that follow each other in a file."""

    place: Place
    entries: list[IndexEntry]
    size: int


def runs(
    storage: Storage, stream: StreamState, entries: Sequence[IndexEntry], bytes_max: int
) -> Iterator[Run]:
    """Yields where these records are; several together have at most ``bytes_max``. Raises OSError for the first one
    that is in no file."""
    run: Run | None = None
    for entry in entries:
        sequence, size = entry.sequence, entry.frame_bytes
        if run is not None:
            follows = sequence == run.entries[-1].sequence + 1 < run.place.end_sequence
            if follows and run.size + size <= bytes_max:
                run.entries.append(entry)
                run.size += size
                continue
            yield run
        run = Run(storage.locate(stream.job, stream.name, sequence), [entry], size)
    if run is not None:
        yield run


# Records that are sent: a thread reads the next piece of a file while the last one is sent. All readers share these
# threads, so a reader costs only the thread of its call.

BUDGET_BYTES = 12 << 20
"""Bytes of messages: of n readers, the last one gets this divided by n. So the 512 that there may be have messages of
80 MiB together. A reader that does not take its answers holds four times its message."""
LEAST_BYTES = 64 << 10
"""Message size that every reader gets. None gets more than two `MESSAGE_BYTES`: an object store answers the same number
of requests a second, whatever their size."""

_DAMAGED = {
    *(errno.EIO, errno.EBADMSG, errno.EUCLEAN),
    *(errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO),
}
"""Errors of a read that mean that the record is lost: reported by the disk or by a file system's checksum, or the file
is missing or replaced. Any other error is the server's own and temporary."""
_ANY_BODY_BYTES = 1 << 62  # no limit: the record was accepted under the limit of its time


class Unreadable(Exception):
    """A record that cannot be sent."""

    def __init__(self, entry: IndexEntry, reason: str, kind: Reason = Reason.CORRUPT) -> None:
        """``kind``: BUSY if it cannot be read at the moment."""
        super().__init__(reason)
        self.entry = entry
        self.reason = reason
        self.kind = kind


class Sending:
    """(one Read call) Reads records, verifies them, and makes messages of them."""

    def __init__(self, storage: Storage, threads: Threads, message_bytes: int) -> None:
        """Raises OSError if there is no memory."""
        self._storage = storage
        self._threads = threads
        self._message_bytes = message_bytes + HEADER_BYTES_MAX
        self._buffer = memoryview(page_aligned(self._message_bytes + 2 * BLOCK_BYTES))

    def messages(self, stream: StreamState, entries: Sequence[IndexEntry]) -> Iterator[bytes]:
        """Yields messages with these records, in order. Raises Unreadable for the first one that cannot be sent."""
        left = deque(entries)
        assembler = Assembler(_ANY_BODY_BYTES)
        pieces = self._pieces(stream, entries)
        following = self._begin(pieces, left)
        while (read := following.result()) is not None:
            view, ends = read
            good, problem = 0, ""
            try:
                for header, _ in assembler.feed(view):
                    _check_header(header, stream, left[0])
                    left.popleft()
                    good += header.frame_bytes
                if ends:
                    assembler.finish()
                good = len(view)
            except LogError as error:
                problem = str(error)
            message = frames_message([view[:good]], good)  # a copy: the buffer is needed again
            if not problem:
                following = self._begin(pieces, left)
            if good:
                yield message
            if problem:
                raise Unreadable(left[0], problem)
        if left:  # an end on a record's boundary is no damage to the assembler
            raise Unreadable(left[0], "its file is too short")

    def _pieces(
        self, stream: StreamState, entries: Sequence[IndexEntry]
    ) -> Iterator[tuple[Place, int, bool]]:
        """Yields (place, size, whether a frame ends there): frames that follow each other, or a part of one."""
        for run in runs(self._storage, stream, entries, self._message_bytes):
            each = -(-run.size // -(-run.size // self._message_bytes))
            for begin in range(0, run.size, each):
                size = min(each, run.size - begin)
                yield run.place.behind(begin), size, begin + size == run.size

    def _begin(
        self, pieces: Iterator[tuple[Place, int, bool]], left: Sequence[IndexEntry]
    ) -> "futures.Future[tuple[memoryview, bool] | None]":
        self._threads.ready()  # starts a thread if needed; if it cannot, an existing one does the work
        return self._threads.submit(self._read, pieces, left)

    def _read(
        self, pieces: Iterator[tuple[Place, int, bool]], left: Sequence[IndexEntry]
    ) -> tuple[memoryview, bool] | None:
        """(a thread) Reads the next piece, which begins with the first record that is left; None at the end."""
        try:
            for place, size, ends in pieces:
                return self._storage.read(place, size, self._buffer), ends
        except OSError as error:
            if error.errno in _DAMAGED:
                raise Unreadable(left[0], f"it cannot be read: {error.strerror}") from None
            raise Unreadable(left[0], f"it cannot be read now: {error.strerror}", Reason.BUSY) from None
        return None


def _check_header(header: FrameHeader, stream: StreamState, entry: IndexEntry) -> None:
    """Raises RecordCorrupt unless this is the indexed record's: the file may have been replaced."""
    is_there = (header.stream_tag, header.sequence, header.key, header.generation, header.frame_bytes)
    is_meant = (stream.tag, entry.sequence, entry.key, entry.generation, entry.frame_bytes)
    if is_there != is_meant or header.digest != entry.digest:
        raise RecordCorrupt("another record is in its place")


# Files that readers on this machine read themselves. See `swift_ft.log.shared_memory`.
#
# A record that is lent is not read here. Its reader verifies it; if it finds damage, it asks again for records that are
# sent, and the server finds the damage then.

_LENT_BYTES = 2 << 20
"""Most bytes of several frames that are read at once."""


class Lender:
    """The files that one Read call lends. (call's thread) all but ``connect``."""

    def __init__(self, storage: Storage) -> None:
        self.key = os.urandom(KEY_BYTES)
        self._storage = storage
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._closed = False
        self._number = 0
        self._lent: tuple[Path, int, int] | None = None
        """The file lent last: its path, device and inode."""

    def connect(self, line: socket.socket) -> bool:
        """(any thread) Takes the reader's connection. Returns False if there is one, or the call is over."""
        with self._lock:
            if self._line is not None or self._closed:
                return False
            with suppress(OSError):  # its reader is gone: the next file is not taken either
                line.send(TAKEN)
            self._line = line
            return True

    @property
    def is_ready(self) -> bool:
        return self._line is not None

    def lend(self, stream: StreamState, entries: Sequence[IndexEntry]) -> tuple[list[log_pb2.Lent], int]:
        """Returns where the first of these records are, consecutive ones together, and how many can be lent."""
        lent: list[log_pb2.Lent] = []
        count = 0
        path: Path | None = None
        try:
            for run in runs(self._storage, stream, entries, _LENT_BYTES):
                if run.place.path != path:
                    path = run.place.path
                    self._hand_over(path, self._storage.descriptor(run.place))
                known = b"".join(_known(entry) for entry in run.entries)
                lent.append(
                    log_pb2.Lent(file=self._number, offset=run.place.offset, size=run.size, known=known)
                )
                count += len(run.entries)
        except OSError:
            pass
        return lent, count

    def _hand_over(self, path: Path, descriptor: int) -> None:
        """Sends the descriptor, which is closed here, unless it is of the file lent last."""
        try:
            found = os.fstat(descriptor)
            this = (path, found.st_dev, found.st_ino)  # another file may have this name by now
            if this != self._lent:
                assert self._line is not None
                socket.send_fds(self._line, [FILE.pack(self._number + 1)], [descriptor])
                self._number += 1
                self._lent = this
        except OSError:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            line, self._line = self._line, None
        if line is not None:
            line.close()


def _known(entry: IndexEntry) -> bytes:
    key = entry.key
    return KNOWN.pack(entry.sequence, entry.generation, key.step, key.microbatch, key.slot, entry.digest)


_POLL_S = 0.5
_LENDING_MAX = 64
"""Readers to which files are lent at the same time; all others get records sent."""
_READ_AHEAD_THREADS = 8
_READ_AT_ONCE_BYTES = 32 << 20
"""Bytes of records after which the index is examined again."""
_LOOKED_AT_ONCE = 500
"""Index entries that are examined before the lock is released: a reader of a small share skips many."""
_STREAMS_AT_ONCE = 50
"""Streams of an inventory that are examined before the lock is released."""
_OTHERS_TURN_S = 0.002


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
        self._inventories: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        """Job -> lock of its inventories: concurrent requests for one job use one thread's share of the processor."""
        self._lenders: dict[bytes, Lender] = {}
        """Of the calls whose readers may be on this machine, by their keys."""
        self._sending = 0
        """Read calls that send records."""
        self._threads = Threads(_READ_AHEAD_THREADS, "read-ahead")

    def wake(self, job: str) -> None:
        """Wakes the readers of the job, so that one whose call has ended notices it."""
        with self._changed:
            self._state.wake_readers([job])

    def read(self, request: log_pb2.ReadRequest, alive: Callable[[], bool]) -> Iterator[bytes]:
        """Yields encoded ReadReplies. Holds a lease on the steps >= ``from_step``: a trim waits for it. Raises Refused
        for trimmed steps, and if memory is short."""
        check_names(request.job.partition("@")[0], request.stream)
        with self._changed:
            self._state.check_apart(request.job)
            while (job := self._state.core.jobs.get(request.job)) is None:
                if not request.follow or not alive():
                    return
                self._wait(request.job)
            self._state.core.check_readable(job, request.from_step)
            self._state.touch(request.job, self._clock())
            reader = next(self._reader_ids)
            job.readers[reader] = request.from_step
        lender = None
        try:
            if request.near and self._state.memory_socket:
                lender = Lender(self._state.storage)
                self._lenders[lender.key] = lender
                yield log_pb2.ReadReply(
                    file_socket=self._state.memory_socket, file_key=lender.key
                ).SerializeToString()
            yield from self._follow(job, request, alive, lender)
        except OSError as error:  # no memory to read into
            raise Refused(Reason.BUSY, f"cannot read now: {error.strerror}") from None
        finally:
            if lender is not None:
                del self._lenders[lender.key]
                lender.close()
            with self._changed:
                del job.readers[reader]
                self._state.touch(request.job, self._clock())
                held_up = job.trim_wanted > job.trimmed_below_step
            if held_up:
                self._administration.trim_later(job)

    def take_reader(self, key: bytes, line: socket.socket) -> bool:
        """(any thread) Takes the connection of a reader that wants to read files itself; not of too many, because each
        takes a descriptor."""
        lender = self._lenders.get(key)
        taken = sum(each.is_ready for each in list(self._lenders.values()))
        return lender is not None and taken < _LENDING_MAX and lender.connect(line)

    def _follow(
        self, job: JobState, request: log_pb2.ReadRequest, alive: Callable[[], bool], lender: Lender | None
    ) -> Iterator[bytes]:
        sequence = request.from_sequence
        with ExitStack() as held:
            sending: Sending | None = None
            while alive():
                near = lender if lender is not None and lender.is_ready else None
                with self._changed:
                    self._state.check_apart(job.name)
                    before = sequence
                    stream, run, sequence, refusal = self._plan_read(job, request, sequence)
                    if not run and sequence == before and refusal is None:
                        if not request.follow:
                            return
                        self._wait(request.job)
                        continue
                if near is not None and stream is not None:
                    lent, run = self._lend(job, near, stream, run)
                    if lent:
                        yield log_pb2.ReadReply(lent=lent).SerializeToString()
                if run and stream is not None:
                    sending = sending or held.enter_context(self._begin_sending())
                    try:
                        yield from sending.messages(stream, run)
                    except Unreadable as unreadable:
                        raise Refused(*self._found_damage(stream, unreadable)) from None
                if refusal is not None:
                    raise Refused(*refusal)

    @contextmanager
    def _begin_sending(self) -> Iterator[Sending]:
        with self._changed:
            self._sending += 1
            most = min(2 * MESSAGE_BYTES, BUDGET_BYTES // self._sending)
        try:
            yield Sending(self._state.storage, self._threads, max(most, LEAST_BYTES))
        finally:
            with self._changed:
                self._sending -= 1

    def _lend(
        self, job: JobState, lender: Lender, stream: StreamState, run: list[IndexEntry]
    ) -> tuple[list[log_pb2.Lent], list[IndexEntry]]:
        """Lends the first of these records, as many as can be lent. Returns where they are, and the others."""
        lent, count = lender.lend(stream, run)
        with self._changed:  # else their files may be of other records
            is_there = self._state.core.jobs.get(job.name) is job
            if not is_there or any(stream.by_sequence.get(entry.sequence) is not entry for entry in run):
                return [], run
        return lent, run[count:]

    def _wait(self, job: str) -> None:
        """(holding ``changed``) Waits for new records. Raises Refused if the server is draining."""
        if self._state.draining:
            self._state.check_open()
        self._state.news(job).wait(_POLL_S)

    def _plan_read(
        self, job: JobState, request: log_pb2.ReadRequest, sequence: int
    ) -> tuple[StreamState | None, list[IndexEntry], int, Refusal | None]:
        """Returns the records to read next, the sequence after them, and the refusal that ends the call after them, if
        any."""
        if self._state.core.jobs.get(job.name) is not job:
            return (
                None,
                [],
                sequence,
                Refusal(Reason.TRIMMED, f"job {job.name} was dropped while it was read"),
            )
        stream = job.streams.get(request.stream)
        if stream is None:
            return None, [], sequence, None
        plan: list[IndexEntry] = []
        share = _share_of(request)
        entries, behind, refusal = self._state.core.durable_records(
            stream, sequence, request.from_step, _LOOKED_AT_ONCE
        )
        size = 0
        for entry in entries:
            if size >= _READ_AT_ONCE_BYTES:
                return stream, plan, entry.sequence, None
            if share is None or share.has(entry.key):
                plan.append(entry)
                size += entry.frame_bytes
        return stream, plan, behind, refusal

    def _found_damage(self, stream: StreamState, unreadable: Unreadable) -> Refusal:
        entry, sequence = unreadable.entry, unreadable.entry.sequence
        reason = f"record {sequence} of {stream.name} {entry.key}: {unreadable.reason}"
        if unreadable.kind is not Reason.CORRUPT:
            return Refusal(unreadable.kind, reason)
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
        check_names(request.job.partition("@")[0], request.stream)
        sequence = end = 0
        while True:
            with self._changed:
                self._state.check_apart(request.job)
                job = self._state.core.known(request.job)
                self._state.core.check_readable(job, request.from_step)
                stream = job.streams.get(request.stream)
                if stream is None:
                    return
                hole = stream.hole_in(stream.first, stream.durable, request.from_step)
                if hole is not None:
                    raise Refused(Reason.CORRUPT, f"{stream.name}: {hole.reason}")
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
        check_names(job_name.partition("@")[0])
        with self._changed:  # of two new locks, one would be lost
            turn = self._inventories.setdefault(job_name, threading.Lock())
        with turn:
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
        trimmed_below_step=job.trimmed_below_step,
    )


def _share_of(request: log_pb2.ReadRequest) -> ReadFilter | None:
    if not request.HasField("share"):
        return None
    share = request.share
    return ReadFilter(first=share.first, behind=share.behind, of=share.of, below_step=share.below_step)
