"""The log's state machine, without I/O: decides which records are accepted or refused, durable or dropped.

Each stream has three watermarks::

    first <= durable <= appended        (sequences; `durable` and `appended` are exclusive ends)

``first`` rises with a trim or a reset, ``durable`` with each commit of the storage, ``appended`` with each accepted
frame. Only records that were appended and are not durable can be taken back (`abandon`). Records are indexed by
sequence, to recognise one that is sent again, and by key, to refuse a second one with the same key.

Each job has one granted generation, which only rises (`fence`), and one step below which everything is trimmed. That
step rises until a `reset`; records after a reset may begin at an older checkpoint.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from swift_ft.log.frame import FrameHeader
from swift_ft.log.protocol import Reason
from swift_ft.log.record import MARK_SLOT, RecordKey, Steps, hull, stream_tag

# Sorted view of a dictionary's integer keys, of which some are removed again: sequences of records, and steps.
#
# Numbers are usually added at the end and removed at the front, so both are cheap. A range given by a client is never
# iterated over: a lookup returns the next number present, however far away it is.


class Ordered:
    """Sorted keys of the dictionary ``there``, which its owner changes.

    The owner calls `came` after a key was added and `went` after one was removed. Removed keys stay in the list until
    they outnumber the others."""

    def __init__(self, there: Mapping[int, Any]) -> None:
        self._there = there
        self._numbers: list[int] = []
        """Sorted; the entry at ``_head`` and the last entry are always present keys."""
        self._head = 0

    def came(self, number: int) -> None:
        numbers = self._numbers
        if not numbers or number > numbers[-1]:
            numbers.append(number)
            return
        at = bisect_left(numbers, number)
        if numbers[at] != number:  # else it was removed, and its place in the list is still there
            numbers.insert(at, number)
        self._head = min(self._head, at)

    def went(self, number: int) -> None:
        numbers, there = self._numbers, self._there
        if len(numbers) - self._head > 2 * len(there) + 64 or not there:
            self._numbers = [kept for kept in numbers[self._head :] if kept in there]
            self._head = 0
        elif number == numbers[-1]:
            while numbers[-1] not in there:
                numbers.pop()
        elif number == numbers[self._head]:
            while numbers[self._head] not in there:
                self._head += 1
            if self._head > len(numbers) // 2:
                del numbers[: self._head]
                self._head = 0

    @property
    def first(self) -> int | None:
        return self._numbers[self._head] if self._there else None

    @property
    def last(self) -> int | None:
        return self._numbers[-1] if self._there else None

    def some(self, begin: int, count: int) -> list[int]:
        """Returns at most ``count`` of the present numbers >= ``begin``, in order; an empty list if there are none."""
        numbers, there = self._numbers, self._there
        at = bisect_left(numbers, begin, self._head)
        while at < len(numbers):
            present = [number for number in numbers[at : at + count] if number in there]
            if present:
                return present
            at += count
        return []


# A log server's state of a stream and of a job: watermarks, index, holes.

NUMBER_MAX = 1 << 48
"""Upper bound of sequences and generations that a client may send. Sums of a few of them still fit a message, a file
name and a database, and no training run comes near it."""


class Refusal(NamedTuple):
    """Reason why a request is refused. ``message`` is for people, ``reason`` for programs."""

    reason: Reason
    message: str


class Refused(Exception):
    """Ends a call with a refusal."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(reason, message)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    sequence: int
    key: RecordKey
    digest: bytes
    generation: int
    frame_bytes: int


STEP_UNKNOWN = 1 << 63
SWEPT_AT_ONCE = 500
"""Records that are processed before the lock is released for others."""
HOLES_MAX = 1024
"""Holes that the writers of a stream may claim. Each is checked for every record that is read or sent again."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A range of records lost to disk damage. A trim at or above ``below_step`` covers it."""

    sequence: int
    end_sequence: int
    below_step: int
    """All lost records are of steps below this one. STEP_UNKNOWN until the first record after the hole bounds it."""
    reason: str
    gone: bool = False
    """No file has any of the records. If the stream ends with such a hole, it continues with the first record that its
    writer still has."""
    claimed: bool = False
    """The hole was reported by a writer, not found by this server."""


@dataclass(slots=True)
class Tally:
    """Records and bytes that the streams of a job keep together."""

    records: int = 0
    bytes: int = 0
    cold_bytes: int = 0
    """Of these, bytes in the cold tier: they take no space here."""

    @property
    def hot_bytes(self) -> int:
        return self.bytes - self.cold_bytes


@dataclass(slots=True)
class StreamState:
    """One stream: a contiguous run of sequences, written by one writer per generation."""

    job: str
    name: str
    first: int = 0
    durable: int = 0
    appended: int = 0
    by_sequence: dict[int, IndexEntry] = field(default_factory=dict)
    by_key: dict[RecordKey, IndexEntry] = field(default_factory=dict)
    holes: list[Hole] = field(default_factory=list)
    quarantined: str = ""
    """Reason why nothing is accepted any more: the writer sent other bytes for a record that is already stored."""
    mending: dict[int, IndexEntry] = field(default_factory=dict)
    """Records of holes that were sent again and are being written to their places."""
    bytes: int = 0
    cold_below: int = 0
    """Records of lower sequences are in the cold tier."""
    cold_bytes: int = 0
    tally: Tally = field(default_factory=Tally)
    """Shared by all streams of the job."""
    tag: int = 0
    marks: dict[int, IndexEntry] = field(default_factory=dict)
    """Sequence -> record that declares steps unlogged."""
    order: Ordered = field(init=False)
    """Sorted keys of `by_sequence`."""
    _steps: dict[int, int] = field(default_factory=dict)
    """Step -> number of its records."""
    _step_order: Ordered = field(init=False)

    def __post_init__(self) -> None:
        self.tag = stream_tag(self.job.partition("@")[0], self.name)  # `LostServers` has several of a job
        self.order = Ordered(self.by_sequence)
        self._step_order = Ordered(self._steps)

    def check(self) -> None:
        assert self.first <= self.durable <= self.appended, (self.first, self.durable, self.appended)

    @property
    def corrupt_reason(self) -> str:
        return self.quarantined or (self.holes[0].reason if self.holes else "")

    def add(self, entry: IndexEntry) -> None:
        sequence, step = entry.sequence, entry.key.step
        self.by_sequence[sequence] = entry
        self.order.came(sequence)
        self.by_key[entry.key] = entry
        count = self._steps.get(step, 0)
        self._steps[step] = count + 1
        if not count:
            self._step_order.came(step)
        if entry.key.slot == MARK_SLOT:
            self.marks[sequence] = entry
        self.bytes += entry.frame_bytes
        self.tally.bytes += entry.frame_bytes
        self.tally.records += 1
        if sequence < self.cold_below:
            self._count_cold(entry.frame_bytes)

    def remove(self, entry: IndexEntry) -> None:
        sequence, step = entry.sequence, entry.key.step
        del self.by_sequence[sequence]
        self.order.went(sequence)
        if self.by_key.get(entry.key) is entry:
            del self.by_key[entry.key]
        self._steps[step] -= 1
        if not self._steps[step]:
            del self._steps[step]
            self._step_order.went(step)
        self.marks.pop(sequence, None)
        self.bytes -= entry.frame_bytes
        self.tally.bytes -= entry.frame_bytes
        self.tally.records -= 1
        if sequence < self.cold_below:
            self._count_cold(-entry.frame_bytes)

    def _count_cold(self, more: int) -> None:
        self.cold_bytes += more
        self.tally.cold_bytes += more

    def moved(self, below: int) -> None:
        """All records below this sequence are in the cold tier now."""
        entries = (
            self.by_sequence.get(sequence) for sequence in range(max(self.cold_below, self.first), below)
        )
        self._count_cold(sum(entry.frame_bytes for entry in entries if entry is not None))
        self.cold_below = max(self.cold_below, below)

    def clear(self) -> list[dict[Any, Any]]:
        """Removes all records and holes. Returns the dictionaries that held them, to be freed outside the lock."""
        garbage: list[dict[Any, Any]] = [self.by_sequence, self.by_key]
        self.tally.bytes -= self.bytes
        self.tally.records -= len(self.by_sequence)
        self._count_cold(-self.cold_bytes)
        self.by_sequence, self.by_key, self.marks, self._steps = {}, {}, {}, {}
        self.order, self._step_order = Ordered(self.by_sequence), Ordered(self._steps)
        self.holes.clear()
        self.mending.clear()
        self.bytes = 0
        return garbage

    def steps_from(self, step: int) -> Steps | None:
        """Returns the range from the first step >= ``step`` that has a record to the last one; None: there is none."""
        first, last = self._step_order.some(step, 1), self._step_order.last
        return Steps(first[0], last) if first and last is not None else None

    @property
    def unlogged(self) -> Steps | None:
        """Range from the first to the last step that marks declare unlogged."""
        return hull(entry.key for entry in self.marks.values())

    def hole_at(self, sequence: int) -> Hole | None:
        for hole in self.holes:
            if hole.sequence <= sequence < hole.end_sequence:
                return hole
        return None

    def hole_in(self, begin: int, end: int, from_step: int) -> Hole | None:
        """Returns the first hole in [begin, end) that may contain records of steps >= ``from_step``."""
        for hole in self.holes:
            if hole.sequence < end and begin < hole.end_sequence and hole.below_step > from_step:
                return hole
        return None

    def lose(self, end: int) -> None:
        """Records a hole up to ``end``: the writer has an acknowledgement for records that are missing here. The stream
        continues after the hole. Raises Refused if there are too many holes."""
        last = self.holes[-1] if self.holes else None
        begin = self.appended
        if last is not None and last.claimed and last.end_sequence == begin:
            self.holes.pop()
            begin = last.sequence
        elif len(self.holes) >= HOLES_MAX:
            message = f"stream {self.name} has {HOLES_MAX} gaps: it takes no more before a trim or a reset"
            raise Refused(Reason.LIMIT, message)
        reason = f"records {begin} to {end - 1} were acknowledged and are gone"
        self.add_hole(Hole(begin, end, STEP_UNKNOWN, reason, claimed=True))

    def add_hole(self, hole: Hole) -> None:
        """Appends a hole that ends at or after the end of the stream."""
        self.holes.append(hole)
        self.appended = max(self.appended, hole.end_sequence)
        self.durable = max(self.durable, hole.end_sequence)
        self.check()

    def insert_hole(self, hole: Hole) -> None:
        insort(self.holes, hole, key=lambda known: known.sequence)

    def cut_hole(self, sequence: int) -> None:
        while (hole := self.hole_at(sequence)) is not None:  # overlapping if two checks found damage
            self.holes.remove(hole)
            for begin, end in ((hole.sequence, sequence), (sequence + 1, hole.end_sequence)):
                if begin < end:
                    self.insert_hole(replace(hole, sequence=begin, end_sequence=end))

    def give_back(self, sequence: int) -> bool:
        """Cuts the stream off at ``sequence`` if that lies in a final hole whose records no file has. Returns whether
        it did. The stream then continues with this record. (Its writer still has all that follow and sends them in
        order.)"""
        hole = self.holes[-1] if self.holes else None
        if (
            hole is None
            or not hole.gone
            or not hole.sequence <= sequence < hole.end_sequence == self.appended
        ):
            return False
        self.holes.pop()
        if hole.sequence < sequence:
            self.holes.append(replace(hole, end_sequence=sequence))
        self.durable = self.appended = sequence
        self.check()
        return True

    def sound_from(self, sequence: int) -> int:
        """Returns the exclusive end of the intact durable records that begin at ``sequence``."""
        for hole in self.holes:
            if hole.end_sequence > sequence:
                return min(self.durable, max(hole.sequence, sequence))
        return self.durable

    def bound_holes(self, step: int) -> None:
        """Sets the step bound of open holes: a record of this step follows them all."""
        if self.holes and self.holes[-1].below_step == STEP_UNKNOWN:
            self.holes = [
                replace(hole, below_step=step + 1) if hole.below_step == STEP_UNKNOWN else hole
                for hole in self.holes
            ]


@dataclass(slots=True)
class JobState:
    """A job: its granted generation and its streams."""

    name: str
    generation: int = 0
    trimmed_below_step: int = 0
    reset_generation: int = 0
    reset_number: int = 0
    """Number of the last durable reset of `reset_generation`. A repeated or older reset request drops nothing."""
    trim_wanted: int = 0
    """Step of the trim requested last; it may wait for readers of older steps."""
    trim_recorded: int = 0
    """Step of the last durable trim. If less than `trimmed_below_step`, a trim could not be recorded yet and is
    owed."""
    uncleaned: "dict[str, StreamState]" = field(default_factory=dict)
    """Streams with dropped records whose space the storage was not yet asked to free, by name."""
    streams: dict[str, StreamState] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    readers: dict[int, int] = field(default_factory=dict)
    """Reader -> oldest step that it may still read."""

    def stream(self, name: str) -> StreamState:
        state = self.streams.get(name)
        if state is None:
            state = self.streams[name] = StreamState(self.name, name, tally=self.tally)
        return state


def check_number(what: str, number: int, most: int = NUMBER_MAX) -> None:
    if number > most:
        raise Refused(Reason.INVALID, f"{what} {number}: none is above {most}")


def fenced(job: JobState, generation: int) -> Refusal:
    return Refusal(
        Reason.STALE_GENERATION,
        f"generation {generation} of job {job.name} was fenced; {job.generation} is granted",
    )


def cannot_be_mended(stream: StreamState, sequence: int) -> Refusal:
    """Returns the refusal for a damaged record that was sent again and does not fit its place."""
    return Refusal(
        Reason.CORRUPT,
        f"record {sequence} of {stream.name} is damaged here, and what was sent again does not fit its place: "
        "it is not acknowledged before a trim or a reset covers the damage",
    )


class LogCore:
    """State of all jobs of one server. Every method is a decision; the caller carries it out. What is refused raises
    Refused."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobState] = {}
        self._garbage: list[dict[Any, Any]] = []

    def known(self, name: str) -> JobState:
        """Returns the job's state; for an unknown job a fresh one that is not kept."""
        return self.jobs.get(name) or JobState(name)

    def job(self, name: str) -> JobState:
        """(on a fence, and at the start) Returns the job's state, created if it is new."""
        state = self.jobs.get(name)
        if state is None:
            state = self.jobs[name] = JobState(name)
        return state

    def generation_of(self, name: str) -> int:
        state = self.jobs.get(name)
        return 0 if state is None else state.generation

    # -- appending ------------------------------------------------------------------------------------

    def check_generation(self, job: JobState, generation: int) -> None:
        if generation < job.generation:
            raise Refused(*fenced(job, generation))
        if generation > job.generation or generation == 0:
            raise Refused(
                Reason.NOT_GRANTED,
                f"generation {generation} of job {job.name} is not granted; {job.generation} is",
            )

    def open(self, job_name: str, stream_name: str, generation: int, acked: int) -> StreamState:
        """Opens a stream for a writer. ``acked``: the writer has acknowledgements for all records below it."""
        job = self.known(job_name)
        self.check_generation(job, generation)
        check_number("acknowledged sequence", acked)
        stream = job.stream(stream_name)
        if stream.quarantined:
            raise Refused(Reason.CONFLICT, f"stream {stream_name} is quarantined: {stream.quarantined}")
        if acked > stream.appended:
            if stream.durable < stream.appended:
                raise Refused(Reason.INVALID, f"nobody acknowledged record {acked - 1} of {stream_name}")
            stream.lose(acked)
        return stream

    def append(self, stream: StreamState, generation: int, frame: FrameHeader) -> IndexEntry | None:
        """Returns the entry to write; if `StreamState.mending` holds it, it replaces a damaged record in place. Returns
        None if the record is already stored: write nothing and acknowledge it again."""
        self.check_generation(self.known(stream.job), generation)
        where = f"{stream.name} {frame.key}"
        if frame.generation != generation:
            raise Refused(Reason.INVALID, f"{where}: generation {frame.generation} in one of {generation}")
        if stream.quarantined:
            raise Refused(Reason.CONFLICT, f"stream {stream.name} is quarantined: {stream.quarantined}")
        if frame.sequence > stream.appended:
            raise Refused(
                Reason.GAP, f"{where}: sequence {frame.sequence} leaves a gap; {stream.appended} is expected"
            )
        known = stream.by_key.get(frame.key)
        if frame.sequence < stream.appended and (known is not None or not stream.give_back(frame.sequence)):
            return self._again(stream, frame, generation)
        if known is not None:
            raise Refused(
                Reason.CONFLICT, f"{where}: is record {known.sequence} already, was sent as {frame.sequence}"
            )
        entry = IndexEntry(frame.sequence, frame.key, frame.digest, generation, frame.frame_bytes)
        stream.bound_holes(frame.key.step)
        stream.add(entry)
        stream.appended += 1
        return entry

    def _again(self, stream: StreamState, frame: FrameHeader, generation: int) -> IndexEntry | None:
        """Handles a record that was sent before. The index is compared, however old the record is."""
        known = stream.by_sequence.get(frame.sequence)
        if known is None or (known.key == frame.key and known.digest == frame.digest):
            return self._mend(stream, known, frame, generation) if stream.holes else None
        stream.quarantined = (
            f"record {frame.sequence} is {known.key} with digest {known.digest.hex()}, "
            f"and was sent again as {frame.key} with digest {frame.digest.hex()}"
        )
        raise Refused(Reason.CONFLICT, f"{stream.name}: {stream.quarantined}")

    def _mend(
        self, stream: StreamState, known: IndexEntry | None, frame: FrameHeader, generation: int
    ) -> IndexEntry | None:
        """Returns an entry to rewrite if the record lies in a hole. ``known``: its index entry, if one is left."""
        if stream.hole_at(frame.sequence) is None or frame.sequence in stream.mending:
            return None
        if known is None and frame.key.step < self.known(stream.job).trimmed_below_step:
            stream.cut_hole(frame.sequence)
            return None
        other = stream.by_key.get(frame.key)
        if other is not known:
            assert other is not None
            message = (
                f"{stream.name} {frame.key}: is record {other.sequence} already, was sent as {frame.sequence}"
            )
            raise Refused(Reason.CONFLICT, message)
        if known is not None and known.frame_bytes != frame.frame_bytes:
            raise Refused(*cannot_be_mended(stream, frame.sequence))
        entry = IndexEntry(frame.sequence, frame.key, frame.digest, generation, frame.frame_bytes)
        stream.mending[frame.sequence] = entry
        return entry

    def mended(self, stream: StreamState, sequence: int) -> int:
        """Records that the storage has durably rewritten the record. Returns by how many bytes the stream has grown."""
        entry = stream.mending.pop(sequence, None)
        if entry is None or sequence < stream.first:
            return 0
        stream.cut_hole(sequence)
        if entry.key.step < self.known(stream.job).trimmed_below_step:
            return 0
        before = stream.bytes
        known = stream.by_sequence.get(sequence)
        if known is not None:
            stream.remove(known)
        stream.add(entry)
        return stream.bytes - before

    def made_durable(self, stream: StreamState, sequence: int) -> None:
        """Raises the durable watermark: the storage has committed everything below ``sequence``."""
        stream.durable = max(stream.durable, min(sequence, stream.appended))
        stream.check()

    def abandon(self, only: str | None = None) -> None:
        """Takes back all records that are appended and not durable, after the storage did not write them. ``only``: the
        job that this concerns."""
        for job in self.jobs.values() if only is None else [self.known(only)]:
            for stream in job.streams.values():
                while (last := stream.order.last) is not None and last >= stream.durable:
                    stream.remove(stream.by_sequence[last])
                stream.mending.clear()
                stream.appended = stream.durable

    # -- generations ----------------------------------------------------------------------------------

    def fence(self, job_name: str, generation: int) -> None:
        """Grants a generation; older writers are refused from then on. Raises Refused if a higher one is granted."""
        check_number("generation", generation)
        job = self.job(job_name)
        if generation < job.generation:
            raise Refused(
                Reason.STALE_GENERATION,
                f"generation {generation} of job {job_name} is older than the granted {job.generation}",
            )
        job.generation = generation

    # -- reading --------------------------------------------------------------------------------------

    def check_readable(self, job: JobState, from_step: int) -> None:
        if from_step < job.trimmed_below_step:
            raise Refused(
                Reason.TRIMMED,
                f"step {from_step} of job {job.name} is trimmed; "
                f"the oldest step there is {job.trimmed_below_step}",
            )

    def durable_records(
        self, stream: StreamState, sequence: int, from_step: int, count: int
    ) -> tuple[list[IndexEntry], int, Refusal | None]:
        """Looks at the next ``count`` records at or after ``sequence``. Returns the durable ones of steps >=
        ``from_step``, the sequence after all that was looked at, and the refusal that stops the reader there, if
        any."""
        entries: list[IndexEntry] = []
        at = max(sequence, stream.first)
        for number in stream.order.some(at, count):
            if number >= stream.durable:
                is_end = True
                break
            entry = stream.by_sequence[number]
            wanted = entry.key.step >= from_step
            hole = stream.hole_in(at, number + 1 if wanted else number, from_step)
            if hole is not None:
                return entries, at, Refusal(Reason.CORRUPT, f"{stream.name}: {hole.reason}")
            if wanted:
                entries.append(entry)
            at = number + 1
        else:
            is_end = stream.order.last is None or at > stream.order.last
        hole = stream.hole_in(at, stream.durable, from_step) if is_end else None
        if hole is not None:
            return entries, at, Refusal(Reason.CORRUPT, f"{stream.name}: {hole.reason}")
        return entries, at, None

    # -- dropping -------------------------------------------------------------------------------------

    def begin_trim(self, job: JobState, below_step: int) -> bool:
        """Makes steps below ``below_step`` unreadable, as far as active readers allow. Returns False if that changes
        nothing. Otherwise each stream must be swept next."""
        job.trim_wanted = max(job.trim_wanted, below_step)
        allowed = min([job.trim_wanted, *job.readers.values()])
        if allowed <= job.trimmed_below_step:
            return False
        job.trimmed_below_step = allowed
        return True

    def sweep(self, job: JobState, stream: StreamState, sequence: int, count: int) -> int | None:
        """Removes trimmed records among the next ``count``. Returns the sequence to continue at, or None at the end."""
        numbers = stream.order.some(sequence, count)
        for number in numbers:
            entry = stream.by_sequence[number]
            if entry.key.step < job.trimmed_below_step and number < stream.durable:
                stream.remove(entry)
        last = stream.order.last
        return numbers[-1] + 1 if numbers and last is not None and last > numbers[-1] else None

    def end_trim(self, job: JobState, stream: StreamState) -> bool:
        """(after the sweep) Drops trimmed holes and raises ``first``. Returns whether ``first`` has risen."""
        stream.holes = [hole for hole in stream.holes if hole.below_step > job.trimmed_below_step]
        kept = stream.order.first
        first = stream.durable if kept is None else kept
        if stream.holes:
            first = min(first, stream.holes[0].sequence)
        changed = first > stream.first
        if changed:
            stream.first = first
        stream.check()
        return changed

    def reset(self, job: JobState) -> list[StreamState]:
        """Drops every record of the job. Sequences continue, and any step may come again. Returns the streams. (The
        caller has waited until all records are durable.)"""
        job.trimmed_below_step = job.trim_wanted = job.trim_recorded = 0
        for stream in job.streams.values():
            assert stream.durable == stream.appended, "a reset waits until everything is durable"
            self.empty(stream)
            stream.quarantined = ""
            stream.first = stream.durable
        return list(job.streams.values())

    def empty(self, stream: StreamState) -> None:
        self._garbage += stream.clear()

    def take_garbage(self) -> list[dict[Any, Any]]:
        """Returns large dictionaries that are unused: freeing them takes long, and needs no lock."""
        garbage, self._garbage = self._garbage, []
        return [some for some in garbage if len(some) > SWEPT_AT_ONCE]
