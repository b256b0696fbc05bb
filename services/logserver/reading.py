"""The reading side: records of a stream in log order, its digests, the inventory."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.logserver.administration import Administration
from services.logserver.readahead import Damage, ReadAhead, Wanted
from services.logserver.readmemory import ReadMemory
from services.logserver.space import Account, Alarm
from services.logserver.state import Refused, ServerState, check_names
from services.logserver.streams import Hole, IndexEntry, JobState, Refusal, StreamState
from services.logserver.watch import rest
from swift import events
from swift._pb import log_pb2
from swift.log.assembly import MESSAGE_BYTES
from swift.log.read_filter import ReadFilter
from swift.log.wire import Reason

_POLL_S = 0.5
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
        with ReadAhead(self._state.storage, self._memory) as ahead:
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
        message, damage = ahead.take()
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
        entries, behind, refusal = self._state.core.look(stream, sequence, request.from_step, _LOOKED_AT_ONCE)
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
