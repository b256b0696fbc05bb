"""The log's state machine, without I/O: what is accepted, known, refused; what is durable; what is gone.

Per stream three watermarks stand together::

    first <= durable <= appended        (sequences; each is exclusive, the first one *not* there)

``first`` rises with a trim or a reset, ``durable`` when the storage says so, ``appended`` with each accepted
frame. What was appended and is not durable can be taken back (`abandon`), nothing else can. Records are found
by sequence, to recognise one that is sent again, and by key, to refuse a second one of the same name.

Per job there is one granted generation, which only rises (`fence`), and one step below which everything is
trimmed, which rises until a `reset`: what comes behind that may begin at an older checkpoint.
"""

from typing import Any

from services.logserver.streams import (
    STEP_UNKNOWN,
    SWEPT_AT_ONCE,
    Hole,
    IndexEntry,
    JobState,
    Refusal,
    StreamState,
    cannot_be_mended,
    too_high,
)
from swift.log.frame import FrameHeader
from swift.log.wire import Reason


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

    def look(
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
