"""What a log server knows of a stream and of a job: watermarks, the index, holes."""

from bisect import insort
from dataclasses import dataclass, field, replace
from typing import Any

from services.logserver.order import Ordered
from swift.log.record import RecordKey, stream_tag
from swift.log.unlogged import MARK_SLOT, Steps, hull
from swift.log.wire import Reason

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
    """Records that were there once and are not to be had. A trim at or above ``below_step`` covers it."""

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
