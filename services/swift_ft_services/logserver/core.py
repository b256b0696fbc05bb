"""The log's state machine, without I/O: what is accepted, known, refused; what is durable; what is gone.

Per stream three watermarks stand together::

    first <= durable <= appended        (sequences; each is exclusive, the first one *not* there)

``first`` rises with a trim or a reset, ``durable`` when the storage says so, ``appended`` with each accepted
frame. What was appended and is not durable can be taken back (`abandon`), nothing else can. Records are found
by sequence, to recognise one that is sent again, and by key, to refuse a second one of the same name.

Per job there is one granted generation, which only rises (`fence`), and one step below which everything is
trimmed, which rises until a `reset`: what comes behind that may begin at an older checkpoint.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swift_ft.log.frame import FrameHeader
from swift_ft.log.protocol import Reason
from swift_ft.log.record import MARK_SLOT, RecordKey, Steps, hull, stream_tag

# The keys of a dictionary in their order, where some go again: sequences of records, steps that records are of.
#
# Numbers come at the end as a rule, and go from the front, so both cost next to nothing. What a client says is never
# counted through: whoever asks gets the next number that is there, however far away it is.


class Ordered:
    """``there`` is the dictionary, which its owner changes: `came` after a key was added, `went` after one was
    removed. Those that went stay in the list until there are more of them than of the others."""

    def __init__(self, there: Mapping[int, Any]) -> None:
        self._there = there
        self._numbers: list[int] = []
        """The first of them from ``_head`` on, and the last one, are there."""
        self._head = 0

    def came(self, number: int) -> None:
        numbers = self._numbers
        if not numbers or number > numbers[-1]:
            numbers.append(number)
            return
        at = bisect_left(numbers, number)
        if numbers[at] != number:  # else it had gone, and its place is there still
            numbers.insert(at, number)
        self._head = min(self._head, at)

    def went(self, number: int) -> None:
        """`number` was removed from the dictionary."""
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
        """At most so many numbers, from ``begin`` on, in order; an empty list: there is none."""
        numbers, there = self._numbers, self._there
        at = bisect_left(numbers, begin, self._head)
        while at < len(numbers):
            present = [number for number in numbers[at : at + count] if number in there]
            if present:
                return present
            at += count
        return []


# What a log server knows of a stream and of a job: watermarks, the index, holes.

NUMBER_MAX = 1 << 48
"""No sequence or generation is above it, whatever a client says: every sum of a few of them fits a message, a file's
name and a database, and no training run gets near it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is not done. ``message`` is for people, ``reason`` for programs."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One record in the index."""

    sequence: int
    key: RecordKey
    digest: bytes
    generation: int
    frame_bytes: int


STEP_UNKNOWN = 1 << 63
SWEPT_AT_ONCE = 500
"""Records, before others have their turn."""
HOLES_MAX = 1024
"""Of a stream, that its writers may claim: each is looked at with every record that is read or sent again."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A range of records lost to disk damage. A trim at or above ``below_step`` covers it."""

    sequence: int
    end_sequence: int
    below_step: int
    """All of them are of steps below; STEP_UNKNOWN until the first record behind them tells."""
    reason: str
    gone: bool = False
    """No file has any of them: a stream that ends with them can go on with the first one that its writer has."""
    claimed: bool = False
    """A writer has said so; nothing here did."""


@dataclass(slots=True)
class Tally:
    """What the streams of a job keep together."""

    records: int = 0
    bytes: int = 0


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
    """Why nothing is accepted any more: the writer sent other bytes for a record that is there."""
    mending: dict[int, IndexEntry] = field(default_factory=dict)
    """Records of holes that were sent again, and are on their way to their places."""
    bytes: int = 0
    tally: Tally = field(default_factory=Tally)
    """Its job's."""
    tag: int = 0
    marks: dict[int, IndexEntry] = field(default_factory=dict)
    """Those of the records that declare steps unlogged, by their sequences."""
    order: Ordered = field(init=False)
    """Of `by_sequence`."""
    _steps: dict[int, int] = field(default_factory=dict)
    """Step -> how many records are of it."""
    _step_order: Ordered = field(init=False)

    def __post_init__(self) -> None:
        self.tag = stream_tag(self.job, self.name)
        self.order = Ordered(self.by_sequence)
        self._step_order = Ordered(self._steps)

    def check(self) -> None:
        assert self.first <= self.durable <= self.appended, (self.first, self.durable, self.appended)

    @property
    def corrupt_reason(self) -> str:
        return self.quarantined or (self.holes[0].reason if self.holes else "")

    def add(self, entry: IndexEntry) -> None:
        """Takes an accepted record into the index and the counts."""
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

    def remove(self, entry: IndexEntry) -> None:
        """Takes it out again: trimmed, abandoned, or dropped."""
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

    def clear(self) -> list[dict[Any, Any]]:
        """Removes all records and holes. What had them, for somebody who has the time to free it."""
        garbage: list[dict[Any, Any]] = [self.by_sequence, self.by_key]
        self.tally.bytes -= self.bytes
        self.tally.records -= len(self.by_sequence)
        self.by_sequence, self.by_key, self.marks, self._steps = {}, {}, {}, {}
        self.order, self._step_order = Ordered(self.by_sequence), Ordered(self._steps)
        self.holes.clear()
        self.mending.clear()
        self.bytes = 0
        return garbage

    def steps_from(self, step: int) -> Steps | None:
        """From the first step at or behind this one that a record is of, to the last one; None: there is no record."""
        first, last = self._step_order.some(step, 1), self._step_order.last
        return Steps(first[0], last) if first and last is not None else None

    @property
    def unlogged(self) -> Steps | None:
        """What marks declare, from the first to the last step."""
        return hull(entry.key for entry in self.marks.values())

    def hole_at(self, sequence: int) -> Hole | None:
        for hole in self.holes:
            if hole.sequence <= sequence < hole.end_sequence:
                return hole
        return None

    def hole_in(self, begin: int, end: int, from_step: int) -> Hole | None:
        """The first one among these sequences that steps from there on may lie in."""
        for hole in self.holes:
            if hole.sequence < end and begin < hole.end_sequence and hole.below_step > from_step:
                return hole
        return None

    def lose(self, end: int) -> Refusal | None:
        """The writer was told that what is below ``end`` is durable, and it is not there. The hole stays known, and the
        stream goes on behind it."""
        last = self.holes[-1] if self.holes else None
        begin = self.appended
        if last is not None and last.claimed and last.end_sequence == begin:
            self.holes.pop()
            begin = last.sequence
        elif len(self.holes) >= HOLES_MAX:
            message = f"stream {self.name} has {HOLES_MAX} gaps: it takes no more before a trim or a reset"
            return Refusal(Reason.LIMIT, message)
        reason = f"records {begin} to {end - 1} were acknowledged and are gone"
        self.add_hole(Hole(begin, end, STEP_UNKNOWN, reason, claimed=True))
        return None

    def add_hole(self, hole: Hole) -> None:
        """Its records end where the stream ends, or before."""
        self.holes.append(hole)
        self.appended = max(self.appended, hole.end_sequence)
        self.durable = max(self.durable, hole.end_sequence)
        self.check()

    def insert_hole(self, hole: Hole) -> None:
        """Among records that are there. Holes stay in the order of their sequences."""
        insort(self.holes, hole, key=lambda known: known.sequence)

    def cut_hole(self, sequence: int) -> None:
        """This record is in no hole any more."""
        while (hole := self.hole_at(sequence)) is not None:  # two of them: two things say that it is damaged
            self.holes.remove(hole)
            for begin, end in ((hole.sequence, sequence), (sequence + 1, hole.end_sequence)):
                if begin < end:
                    self.insert_hole(replace(hole, sequence=begin, end_sequence=end))

    def give_back(self, sequence: int) -> bool:
        """Whether it is of records that are gone, and the stream ends with these: then it ends before this one, and
        goes on with it. (Its writer has all that follow: they come in their order.)"""
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
        """From there on everything can be had up to here, exclusive."""
        for hole in self.holes:
            if hole.end_sequence > sequence:
                return min(self.durable, max(hole.sequence, sequence))
        return self.durable

    def bound_holes(self, step: int) -> None:
        """A record of this step stands behind all holes."""
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
    """The last reset that is durable, of that generation's: asked for again, or an older one, nothing is dropped."""
    trim_wanted: int = 0
    """A trim that waits for readers of older steps."""
    trim_recorded: int = 0
    """The last trim that is durable: if less than `trimmed_below_step`, one could not be recorded, and is owed."""
    uncleaned: "dict[str, StreamState]" = field(default_factory=dict)
    """Streams with something dropped whose space nobody was told to give back, by their names."""
    streams: dict[str, StreamState] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    readers: dict[int, int] = field(default_factory=dict)
    """Reader -> the oldest step it may still want."""

    def stream(self, name: str) -> StreamState:
        state = self.streams.get(name)
        if state is None:
            state = self.streams[name] = StreamState(self.name, name, tally=self.tally)
        return state


def too_high(what: str, number: int, most: int = NUMBER_MAX) -> Refusal | None:
    if number <= most:
        return None
    return Refusal(Reason.INVALID, f"{what} {number}: none is above {most}")


def cannot_be_mended(stream: StreamState, sequence: int) -> Refusal:
    """A record that is damaged here was sent again."""
    return Refusal(
        Reason.CORRUPT,
        f"record {sequence} of {stream.name} is damaged here, and what was sent again does not fit its place: "
        "it is not acknowledged before a trim or a reset covers the damage",
    )


class LogCore:
    """All jobs of one server. Every method is a decision; the caller does what it says."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobState] = {}
        self._garbage: list[dict[Any, Any]] = []

    def known(self, name: str) -> JobState:
        """The job; of one that is not there, what anybody may know, and nothing is kept."""
        return self.jobs.get(name) or JobState(name)

    def job(self, name: str) -> JobState:
        """(a fence, or the start) The job, from now on."""
        state = self.jobs.get(name)
        if state is None:
            state = self.jobs[name] = JobState(name)
        return state

    def generation_of(self, name: str) -> int:
        """0: the job is not known, or has none yet."""
        state = self.jobs.get(name)
        return 0 if state is None else state.generation

    # -- appending ------------------------------------------------------------------------------------

    def check_generation(self, job: JobState, generation: int) -> Refusal | None:
        """The refusal of a writer that is not of the granted generation; None: it is."""
        if generation < job.generation:
            return Refusal(
                Reason.STALE_GENERATION,
                f"generation {generation} of job {job.name} was fenced; {job.generation} is granted",
            )
        if generation > job.generation or generation == 0:
            return Refusal(
                Reason.NOT_GRANTED,
                f"generation {generation} of job {job.name} is not granted; {job.generation} is",
            )
        return None

    def open(self, job_name: str, stream_name: str, generation: int, acked: int) -> StreamState | Refusal:
        """A writer takes a stream. ``acked``: it was told that everything below is durable."""
        job = self.known(job_name)
        refusal = self.check_generation(job, generation) or too_high("acknowledged sequence", acked)
        if refusal is not None:
            return refusal
        stream = job.stream(stream_name)
        if stream.quarantined:
            return Refusal(Reason.CONFLICT, f"stream {stream_name} is quarantined: {stream.quarantined}")
        if acked > stream.appended:
            if stream.durable < stream.appended:
                return Refusal(Reason.INVALID, f"nobody acknowledged record {acked - 1} of {stream_name}")
            return stream.lose(acked) or stream
        return stream

    def append(self, stream: StreamState, generation: int, frame: FrameHeader) -> IndexEntry | Refusal | None:
        """An entry: write it; in the place of a damaged one, if `StreamState.mending` has it. None: it is there
        already, write nothing and acknowledge it again."""
        job = self.known(stream.job)
        refusal = self.check_generation(job, generation)
        if refusal is not None:
            return refusal
        where = f"{stream.name} {frame.key}"
        if frame.generation != generation:
            return Refusal(Reason.INVALID, f"{where}: generation {frame.generation} in one of {generation}")
        if stream.quarantined:
            return Refusal(Reason.CONFLICT, f"stream {stream.name} is quarantined: {stream.quarantined}")
        if frame.sequence > stream.appended:
            return Refusal(
                Reason.GAP, f"{where}: sequence {frame.sequence} leaves a gap; {stream.appended} is expected"
            )
        known = stream.by_key.get(frame.key)
        if frame.sequence < stream.appended and (known is not None or not stream.give_back(frame.sequence)):
            return self._again(stream, frame, generation)
        if known is not None:
            return Refusal(
                Reason.CONFLICT, f"{where}: is record {known.sequence} already, was sent as {frame.sequence}"
            )
        entry = IndexEntry(frame.sequence, frame.key, frame.digest, generation, frame.frame_bytes)
        stream.bound_holes(frame.key.step)
        stream.add(entry)
        stream.appended += 1
        return entry

    def _again(self, stream: StreamState, frame: FrameHeader, generation: int) -> IndexEntry | Refusal | None:
        """A record that was sent before. The index answers, however long ago it was."""
        known = stream.by_sequence.get(frame.sequence)
        if known is None or (known.key == frame.key and known.digest == frame.digest):
            return self._mend(stream, known, frame, generation) if stream.holes else None
        stream.quarantined = (
            f"record {frame.sequence} is {known.key} with digest {known.digest.hex()}, "
            f"and was sent again as {frame.key} with digest {frame.digest.hex()}"
        )
        return Refusal(Reason.CONFLICT, f"{stream.name}: {stream.quarantined}")

    def _mend(
        self, stream: StreamState, known: IndexEntry | None, frame: FrameHeader, generation: int
    ) -> IndexEntry | Refusal | None:
        """It is needed again if it is in a hole. ``known``: what the index has of it still."""
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
            return Refusal(Reason.CONFLICT, message)
        if known is not None and known.frame_bytes != frame.frame_bytes:
            return cannot_be_mended(stream, frame.sequence)
        entry = IndexEntry(frame.sequence, frame.key, frame.digest, generation, frame.frame_bytes)
        stream.mending[frame.sequence] = entry
        return entry

    def mended(self, stream: StreamState, sequence: int) -> int:
        """The storage has it in its place, for good. Gives by how much more is kept now."""
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
        """The storage has everything below ``sequence`` for good."""
        stream.durable = max(stream.durable, min(sequence, stream.appended))
        stream.check()

    def abandon(self) -> None:
        """The storage could not write: takes back all that is appended and not durable."""
        for job in self.jobs.values():
            for stream in job.streams.values():
                while (last := stream.order.last) is not None and last >= stream.durable:
                    stream.remove(stream.by_sequence[last])
                stream.mending.clear()
                stream.appended = stream.durable

    def lost(self, stream: StreamState, first: int, reason: str) -> None:
        """No file has the records from there on any more. (Nothing is on its way to the disk.)"""
        gone = [entry for entry in stream.by_sequence.values() if entry.sequence >= first]
        for entry in gone:
            stream.remove(entry)
        begin = max(first, stream.first)
        if begin < stream.appended:
            below_step = max((entry.key.step + 1 for entry in gone), default=STEP_UNKNOWN)
            stream.insert_hole(Hole(begin, stream.appended, below_step, reason, gone=True))

    # -- generations ----------------------------------------------------------------------------------

    def fence(self, job_name: str, generation: int) -> Refusal | None:
        """Grants a generation, from which on older writers are refused. A refusal if a higher one is granted."""
        refusal = too_high("generation", generation)
        if refusal is not None:
            return refusal
        job = self.job(job_name)
        if generation < job.generation:
            return Refusal(
                Reason.STALE_GENERATION,
                f"generation {generation} of job {job_name} is older than the granted {job.generation}",
            )
        job.generation = generation
        return None

    # -- reading --------------------------------------------------------------------------------------

    def check_readable(self, job: JobState, from_step: int) -> Refusal | None:
        if from_step < job.trimmed_below_step:
            return Refusal(
                Reason.TRIMMED,
                f"step {from_step} of job {job.name} is trimmed; "
                f"the oldest step there is {job.trimmed_below_step}",
            )
        return None

    def durable_records(
        self, stream: StreamState, sequence: int, from_step: int, count: int
    ) -> tuple[list[IndexEntry], int, Refusal | None]:
        """The durable records of a step >= ``from_step`` among the next ``count`` that are there at or behind
        ``sequence``; the sequence behind all that was looked at; and what keeps a reader from going on there."""
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
        """Drops the steps below, as far as readers allow: nobody gets them any more. False: nothing is new. Each stream
        is to be swept then."""
        job.trim_wanted = max(job.trim_wanted, below_step)
        allowed = min([job.trim_wanted, *job.readers.values()])
        if allowed <= job.trimmed_below_step:
            return False
        job.trimmed_below_step = allowed
        return True

    def sweep(self, job: JobState, stream: StreamState, sequence: int, count: int) -> int | None:
        """Removes what is trimmed among the next ``count`` records at or behind ``sequence``. Where to go on; None:
        that was the end."""
        numbers = stream.order.some(sequence, count)
        for number in numbers:
            entry = stream.by_sequence[number]
            if entry.key.step < job.trimmed_below_step and number < stream.durable:
                stream.remove(entry)
        last = stream.order.last
        return numbers[-1] + 1 if numbers and last is not None and last > numbers[-1] else None

    def end_trim(self, job: JobState, stream: StreamState) -> bool:
        """(once it is swept) Whether the stream has given something up at its beginning."""
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

    def trim(self, job: JobState, below_step: int) -> list[StreamState]:
        """All of it at once. Gives the streams that changed."""
        if not self.begin_trim(job, below_step):
            return []
        changed = []
        for stream in job.streams.values():
            sequence: int | None = 0
            while sequence is not None:
                sequence = self.sweep(job, stream, sequence, SWEPT_AT_ONCE)
            if self.end_trim(job, stream):
                changed.append(stream)
        return changed

    def reset(self, job: JobState) -> list[StreamState]:
        """Drops every record of the job; sequences go on, and any step may come again. (The caller has waited until all
        are durable.)"""
        job.trimmed_below_step = job.trim_wanted = job.trim_recorded = 0
        for stream in job.streams.values():
            assert stream.durable == stream.appended, "a reset waits until everything is durable"
            self.empty(stream)
            stream.quarantined = ""
            stream.first = stream.durable
        return list(job.streams.values())

    def empty(self, stream: StreamState) -> None:
        """Removes all of its records and holes."""
        self._garbage += stream.clear()

    def take_garbage(self) -> list[dict[Any, Any]]:
        """What nobody needs any more, to be emptied piece by piece without the lock: it takes a while to free it."""
        garbage, self._garbage = self._garbage, []
        return [some for some in garbage if len(some) > SWEPT_AT_ONCE]
