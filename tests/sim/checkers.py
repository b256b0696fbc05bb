"""What must hold whatever happens. Stands apart from the system: it imports nothing of it, reads frames by itself,
and is told what was said and done by the simulated world.

- *acked*: what a server acknowledged is there, with its bytes, until it is trimmed, the job gives its log up or the
  server's disk is lost; or it is refused, and then only where bytes were damaged or the sync policy allows their loss
- *whole*: the coordinator counts no copy as whole from a step on that its server has lost with a disk
- *emptied*: a server that comes into use has nothing from before
- *writer*: one writer per generation of a stream, and nothing of an older generation is accepted once a fence was
  answered, whatever crashes
- *unique*: a key has one sequence, and a sequence one content, unless damage has cost it the one that it had
- *replay*: what a replaying rank reads is what was computed, and so is the state that it says it is ready with
- *declared*: behind a record that was dropped, nothing is sent before a mark that declares it
- *gap*: no plan replays a step that an acknowledged mark declares, nor writes it again
- *trim*: no trim passes the newest complete checkpoint
- *reset*: nothing that was acknowledged after a reset was answered is dropped by it, all that was before it is gone
- *live*: when faults stop, the job ends within bounded time (the world looks)
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_FRAME = struct.Struct("<4sHHIIQQQQIIQQ")
_KEY_MASK = (1 << 64) - 1
_MARK_SLOT = (1 << 32) - 1
_NONE = (0, 0)


Reset = tuple[int, int]
"""(generation, which of its resets)"""


class Violation(AssertionError):
    """A promise was broken."""

    def __init__(self, checker: str, message: str) -> None:
        super().__init__(f"{checker}: {message}")
        self.checker = checker


@dataclass(frozen=True, slots=True)
class Seen:
    """One frame, as its bytes say."""

    tag: int
    sequence: int
    generation: int
    step: int
    key: tuple[int, int, int]
    body: bytes


def frames_in(data: bytes | memoryview) -> Iterator[Seen]:
    at = 0
    while at < len(data):
        magic, _, header, _, _, tag, sequence, generation, step, microbatch, slot, _, stored = (
            _FRAME.unpack_from(data, at)
        )
        assert magic == b"SWFR"
        body = bytes(data[at + header : at + header + stored])
        yield Seen(tag, sequence, generation, step, (step, microbatch, slot), body)
        at += header + stored


def frames_of_message(message: bytes) -> Iterator[Seen]:
    """Of a message that holds nothing but frames: a tag, a length, the frames."""
    if message and message[0] == 15 << 3 | 2:
        at = 1
        while message[at] & 0x80:
            at += 1
        yield from frames_in(memoryview(message)[at + 1 :])


def _declares(key: tuple[int, int, int]) -> range:
    """The steps that a mark says are not whole."""
    return range(key[0] - key[1], key[0] + 1)


class Truth:
    """What a run without failures computes. A job that gives its log up begins another *history*, whose bits differ."""

    def __init__(self, ranks: int, repeats: int) -> None:
        """A tensor is a number of 8 bytes, so many times."""
        self.ranks = ranks
        self.repeats = repeats
        self.bases: dict[int, tuple[int, int]] = {}
        """history -> (the version that it begins with, the history before it)"""
        self._states: dict[tuple[int, int, int], int] = {}

    def begin(self, history: int, version: int, before: int) -> None:
        self.bases[history] = (version, before)

    def state(self, rank: int, version: int, history: int) -> int:
        while history in self.bases and version <= self.bases[history][0]:
            history = self.bases[history][1]
        if version == 0:
            return first_state(rank)
        known = self._states.get((rank, version, history))
        if known is None:
            step = version - 1
            known = next_state(
                self.state(rank, step, history),
                self.sent("F", rank - 1, step, history) if rank else 0,
                self.sent("B", rank + 1, step, history) if rank + 1 < self.ranks else 0,
            )
            self._states[rank, version, history] = known
        return known

    def sent(self, kind: str, rank: int, step: int, history: int) -> int:
        """What `rank` sends in `step`, if the step is done in `history`."""
        while history in self.bases and step < self.bases[history][0]:
            history = self.bases[history][1]
        state = self.state(rank, step, history)
        if kind == "F":
            return output(state, history, self.sent("F", rank - 1, step, history) if rank else 0)
        return output(
            state, -1 - history, self.sent("B", rank + 1, step, history) if rank + 1 < self.ranks else 0
        )


def first_state(rank: int) -> int:
    return hash((rank, 17)) & _KEY_MASK


def next_state(state: int, forward: int, backward: int) -> int:
    return hash((state, forward, backward)) & _KEY_MASK


def output(state: int, salt: int, received: int) -> int:
    return hash((state, salt, received)) & _KEY_MASK


def body_of(value: int, repeats: int) -> bytes:
    return value.to_bytes(8, "little") * repeats


@dataclass(slots=True)
class _Acked:
    key: tuple[int, int, int]
    body: bytes
    generation: int
    after: Reset
    """The newest reset that its server had answered when it acknowledged it."""
    dropped_before: Reset
    """The newest one that had dropped something there."""
    by: set[str]
    """The servers that have acknowledged it."""


class Checkers:
    """Told by the world; raises Violation."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.fenced: dict[str, int] = {}
        """server -> the newest generation that it has answered a fence with"""
        self._generation = 0
        self._coordinators: list[object] = []
        """Those that have committed something, in this order."""
        self._answered: dict[str, Reset] = {}
        """server -> the newest reset that it has answered"""
        self._dropped_by: dict[str, Reset] = {}
        """server -> the newest reset that it has begun"""
        self._came: dict[str, int] = {}
        """server -> the generation in which it came into use"""
        self._gone: dict[str, set[tuple[str, int]]] = {}
        """server -> (stream, step) of what it acknowledged and has lost with its disk"""
        self._missing: dict[str, set[tuple[str, int]]] = {}
        """The same; the coordinator has fenced the server since."""
        self.damaged: set[str] = set()
        """Streams whose bytes were damaged: they may be refused, never wrong nor short."""
        self.lossy: set[str] = set()
        """Streams that a power cut took from what the sync policy does not promise: they may be short as well."""
        self.trimmed = 0
        """The step below which a trim was allowed."""
        self._saved: set[tuple[int, int, int]] = set()
        """(rank, version, state) of durable checkpoints"""
        self._sent: dict[tuple[str, int], dict[int, Seen]] = {}
        self._writers: dict[tuple[int, int], str] = {}
        self._dropped: dict[tuple[str, int], set[int]] = {}
        """(writer, stream) -> the steps that it has dropped records of and not declared yet."""
        self._acked: dict[str, dict[int, _Acked]] = {}
        self._forgotten: dict[str, list[_Acked]] = {}
        """Of damaged streams: what was acknowledged with a sequence that another record has now."""
        self._begins: dict[str, int] = {}
        """stream -> the first sequence behind its last reset"""
        self.acks = 0
        """Records that were acknowledged."""
        self.compared = 0
        """Times that one of them was read back and was the same."""

    # -- writing --------------------------------------------------------------------------------------

    def sent(self, writer: str, message: bytes) -> None:
        for seen in frames_of_message(message):
            self._sent.setdefault((writer, seen.tag), {})[seen.sequence] = seen
            dropped = self._dropped.get((writer, seen.tag), set())
            if seen.key[2] == _MARK_SLOT:
                dropped.difference_update(_declares(seen.key))
            elif any(step < seen.step for step in dropped):
                raise Violation(
                    "declared",
                    f"{writer} sends a record of step {seen.step}, has dropped records of steps {sorted(dropped)}, "
                    "and has not said so",
                )

    def dropped(self, writers: list[str], tag: int, step: int) -> None:
        """A record is not sent, to any of the servers that it should be on."""
        for writer in writers:
            self._dropped.setdefault((writer, tag), set()).add(step)

    def given_up(self, name: str) -> None:
        """Everybody restores; the process goes on with empty streams."""
        for key in [key for key in self._dropped if key[0].endswith(f"/{name}")]:
            del self._dropped[key]

    def accepted(self, server: str, writer: str, frame: bytes | memoryview) -> None:
        for seen in frames_in(frame):
            if seen.generation < self.fenced.get(server, 0):
                raise Violation(
                    "writer",
                    f"{server} took record {seen.sequence} of {writer} in generation {seen.generation} "
                    f"after it had answered the fence of {self.fenced[server]}",
                )
            first = self._writers.setdefault((seen.tag, seen.generation), writer)
            if first != writer:
                raise Violation(
                    "writer", f"{first} and {writer} both write a stream in generation {seen.generation}"
                )

    def acknowledged(self, server: str, writer: str, stream: str, tag: int, durable: int) -> None:
        acked, begins = self._acked.setdefault(stream, {}), self._begins.get(stream, 0)
        answered = self._answered.get(server, _NONE)
        for sequence, seen in self._sent.get((writer, tag), {}).items():
            if not begins <= sequence < durable:
                continue
            known = acked.get(sequence)
            if known is None:
                acked[sequence] = _Acked(
                    seen.key,
                    seen.body,
                    seen.generation,
                    answered,
                    self._dropped_by.get(server, _NONE),
                    {server},
                )
                self.acks += 1
            elif (known.key, known.body) == (seen.key, seen.body):
                known.after = max(known.after, answered)
                known.by.add(server)
            elif stream in self.damaged:
                # Where nobody can tell how far the damage goes, what was behind it is forgotten and its sequences are
                # given again. Readers must be refused until it is trimmed.
                self._forgotten.setdefault(stream, []).append(known)
                acked[sequence] = _Acked(
                    seen.key, seen.body, seen.generation, answered, known.dropped_before, {server}
                )
            elif stream not in self.lossy:
                raise Violation("unique", f"record {sequence} of {stream} was acknowledged with two contents")

    def generation_saved(self, generation: int, by: object) -> None:
        """By this coordinator, durably."""
        if generation < self._generation:
            raise Violation("generation", f"generation {generation} is used again, after {self._generation}")
        if any(by is former for former in self._coordinators[:-1]):
            raise Violation(
                "generation", f"a coordinator commits generation {generation} after its successor"
            )
        if not self._coordinators or self._coordinators[-1] is not by:
            self._coordinators.append(by)
        self._generation = generation

    def fence_answered(self, server: str, generation: int) -> None:
        self.fenced[server] = max(generation, self.fenced.get(server, 0))
        self._missing.setdefault(server, set()).update(self._gone.pop(server, ()))

    # -- servers that come and go -----------------------------------------------------------------------

    def disk_lost(self, server: str) -> None:
        """It comes back with an empty one, if it does."""
        gone = self._gone.setdefault(server, set())
        for stream in [stream for stream in self._acked if stream.startswith(f"{server}/")]:
            gone.update((stream, record.key[0]) for record in self._acked.pop(stream).values())
            self._forgotten.pop(stream, None)
            self._begins.pop(stream, None)
        for streams in (self.damaged, self.lossy):
            streams.difference_update([stream for stream in streams if stream.startswith(f"{server}/")])
        self._answered.pop(server, None)
        self._dropped_by.pop(server, None)

    def comes(self, server: str, generation: int) -> None:
        """From this generation on it is used; it was not before, or was lost since."""
        self._came[server] = generation
        # It has nothing of the steps before, declared or not: nobody counts on it for these (*whole*).
        for key in [key for key in self._dropped if key[0].startswith(f"{server}/")]:
            del self._dropped[key]
        for stream, acked in self._acked.items():
            if stream.startswith(f"{server}/"):
                for sequence, record in acked.items():
                    self._check_came(server, stream, sequence, record.generation)

    def _check_came(self, server: str, stream: str, sequence: int, generation: int) -> None:
        came = self._came.get(server, 0)
        if generation < came:
            raise Violation(
                "emptied",
                f"{server} came into use in generation {came} with record {sequence} of {stream}, "
                f"of generation {generation}",
            )

    def counts(self, server: str, streams: list[str], whole_from: int, version: int) -> None:
        """Training goes on at this version, and the coordinator holds that all steps before it, from the first on,
        are in these streams of a server."""
        for step in self._lost_steps(server, streams, whole_from, version):
            raise Violation(
                "whole", f"{streams} count from step {whole_from} on; step {step} went with a disk"
            )

    def _lost_steps(self, server: str, streams: list[str], first: int, until: int) -> Iterator[int]:
        """Whose records a server has lost with its disk, and has not got again."""
        for stream, step in sorted(self._missing.get(server, ())):
            there = any(record.key[0] == step for record in self._acked.get(stream, {}).values())
            if stream in streams and max(first, self.trimmed) <= step < until and not there:
                yield step

    def history_begins(self) -> None:
        """The log is given up: nobody counts on what it had."""
        self._gone.clear()
        self._missing.clear()

    # -- dropping -------------------------------------------------------------------------------------

    def saved(self, rank: int, version: int, state: int) -> None:
        self._saved.add((rank, version, state))

    def trim_asked(self, below_step: int, history: int) -> None:
        for rank in range(self.truth.ranks):
            if (rank, below_step, self.truth.state(rank, below_step, history)) not in self._saved:
                raise Violation(
                    "trim", f"a trim below step {below_step}, and rank {rank} has no such checkpoint"
                )
        self.trimmed = max(below_step, self.trimmed)

    def trim_done(self, server: str, below_step: int) -> None:
        if below_step > self.trimmed:
            raise Violation(
                "trim", f"{server} has trimmed below step {below_step}, and was asked for {self.trimmed}"
            )

    def reset_done(self, server: str, streams: Mapping[str, int], reset: Reset) -> None:
        """A server has dropped every record of these streams (name -> the sequence at which each goes on)."""
        self._dropped_by[server] = max(reset, self._dropped_by.get(server, _NONE))
        for stream, goes_on_at in streams.items():
            self._begins[stream] = goes_on_at
            self._forgotten.pop(stream, None)
            for sequence, acked in self._acked.pop(stream, {}).items():
                if acked.after >= reset:
                    raise Violation(
                        "reset",
                        f"record {sequence} of {stream} was acknowledged after reset {reset} was answered, "
                        "and is dropped by it",
                    )

    def reset_answered(self, server: str, reset: Reset) -> None:
        if reset <= self._answered.get(server, _NONE):
            return
        self._answered[server] = reset
        # Before that a kill may undo it. What was damaged stays so: a power cut may bring removed files back.
        self.lossy -= {stream for stream in self.lossy if stream.startswith(f"{server}/")}
        for stream, acked in self._acked.items():
            for sequence, record in acked.items() if stream.startswith(f"{server}/") else ():
                if record.dropped_before < reset:
                    raise Violation(
                        "reset",
                        f"{server} has answered reset {reset} and kept record {sequence} of {stream}, "
                        f"of generation {record.generation}",
                    )

    # -- reading --------------------------------------------------------------------------------------

    def check_log(
        self, server: str, streams: set[str], read: Callable[[str], tuple[list[bytes], str]]
    ) -> None:
        """``read(stream)`` gives what a reader from the oldest step gets: frames, and the reason of a refusal.

        ``streams``: those that the server knows. What it has acknowledged is looked for even if it knows nothing."""
        acked = {
            name for name, found in self._acked.items() if any(server in one.by for one in found.values())
        }
        for stream in sorted(streams | acked):
            messages, refused = read(stream)
            found: dict[int, Seen] = {}
            keys: dict[tuple[int, int, int], int] = {}
            for message in messages:
                for seen in frames_of_message(message):
                    found[seen.sequence] = seen
                    self._check_came(server, stream, seen.sequence, seen.generation)
                    other = keys.setdefault(seen.key, seen.sequence)
                    if other != seen.sequence:
                        raise Violation(
                            "unique", f"{stream}: {seen.key} is record {other} and record {seen.sequence}"
                        )
            if refused and stream not in self.damaged and stream not in self.lossy:
                raise Violation("acked", f"{server} refuses to read {stream}, undamaged: {refused}")
            self._compare(server, stream, found, bool(refused))

    def _compare(self, server: str, stream: str, found: dict[int, Seen], refused: bool) -> None:
        acked = self._acked.get(stream, {})
        may_miss = refused or stream in self.lossy
        for record in self._forgotten.get(stream, ()):
            if record.key[0] >= self.trimmed and not may_miss:
                raise Violation("acked", f"{record.key} of {stream} was acknowledged and is forgotten")
        for sequence, record in acked.items():
            if server not in record.by:
                continue
            seen = found.get(sequence)
            if seen is None:
                if record.key[0] >= self.trimmed and not may_miss:
                    raise Violation(
                        "acked", f"record {sequence} of {stream}, {record.key}, was acknowledged and is gone"
                    )
            elif (seen.key, seen.body) != (record.key, record.body) and stream not in self.lossy:
                raise Violation("acked", f"record {sequence} of {stream} is not what was acknowledged")
            else:
                self.compared += 1

    # -- replaying ------------------------------------------------------------------------------------

    def replayed(self, reader: str, kind: str, stage: int, history: int, step: int, body: bytes) -> None:
        """A rank has used a record of the log in place of a message."""
        if body != body_of(self.truth.sent(kind, stage, step, history), self.truth.repeats):
            raise Violation(
                "replay", f"{reader} was given another tensor than s{stage}.{kind} of step {step}"
            )

    def reads(self, reader: str, server: str, stream: str, first: int, until: int) -> None:
        """A plan has it replay these steps from a server's stream."""
        for step in self._lost_steps(server, [stream], first, until):
            raise Violation(
                "whole", f"{reader} is to read {stream} from step {first} on; step {step} went with a disk"
            )

    def replays(self, reader: str, stream: str, first: int, until: int) -> None:
        """A plan has it read or write these steps of a server's stream again."""
        if stream in self.damaged or stream in self.lossy:
            return
        for record in self._acked.get(stream, {}).values():
            if record.key[2] == _MARK_SLOT and set(_declares(record.key)) & set(range(first, until)):
                raise Violation(
                    "gap",
                    f"{reader} is to replay steps {first} to {until - 1}, and {stream} declares that steps "
                    f"{[*_declares(record.key)]} are not whole",
                )

    def ready(self, who: str, rank: int, version: int, history: int, state: int) -> None:
        if state != self.truth.state(rank, version, history):
            raise Violation("replay", f"{who} is ready at version {version} with other bits")
