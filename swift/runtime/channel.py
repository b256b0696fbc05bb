"""What crosses the boundaries of a rank: recorded while it runs, answered from the log while it replays.

Streams are named by stage and data-parallel rank (`swift.log.streams`), each has one writer. A record's key is (step,
microbatch, slot).

A replay runs the trainer's own step. What the step receives comes out of the log; what it sends is compared
with what was logged before ("verify") or logged where the log has a hole ("fill"): records that the dead
process had not got out. So two ranks that replay at once feed each other through the log.
"""

import copy
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from swift.errors import LogInterrupted, RecordMissing, ReplayRefused
from swift.log import streams
from swift.log.read_filter import ReadFilter
from swift.log.reader import LogReader, StreamCursor
from swift.log.record import RecordKey
from swift.log.writers import Writer
from swift.recovery.assignment import Assignment
from swift.recovery.groups import RecoveryGroups
from swift.recovery.regroup import LoggedGroups
from swift.runtime import layer_faults
from swift.runtime.capture import Capture, NoCapture, capture_for
from swift.runtime.faults import FaultInjector
from swift.runtime.process_groups import Interrupted
from swift.runtime.profiling import WEIGHTS, StepProfile
from swift.runtime.rng import Randomness
from swift.runtime.shapes import Shapes
from swift.runtime.shared_replay.waits import ReplayClock
from swift.runtime.tensors import fill, to_tensor
from swift.runtime.witness import INPUT, LOSS, RESULT, SENT, TARGET, Witness

FORWARD = "F"
BACKWARD = "B"
_PHASES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weights"}

# A record that nobody has written for this long will not come: its writer would have been declared dead.
RECORD_TIMEOUT_S = 120.0


class Channel:
    """One rank's boundaries.

    (session) ``open(writer)``; per step ``begin_step``; around a replay ``begin_replay``, ``end_replay``
    (stages) ``entered``, ``receive``, ``sent``, ``targeted``, ``computed``
    (session, for the trainer) ``collective``
    (engine, stages, updates) ``settle`` before memory is used again

    What is sent to other stages is *lent* to the ring (`swift.runtime.capture`): a native thread copies it while
    the trainer computes, and it is kept alive. That is safe because torch's own asynchronous send has lent it just
    the same, and because everything that may overwrite it waits in `settle`: the next call of the schedule (receive
    buffers, of which an activation may be a view), the optimizer (a stage may send a view of a parameter), the end
    of a step. A trainer that changes a tensor in place meanwhile is found by its version counter. Everything else
    is copied at once, by the trainer's thread: external inputs and targets, which a module or a loader may change
    in place, and are small, and results of collectives, which the trainer gets to keep.
    """

    def __init__(
        self,
        rank: int,
        assignment: Assignment,
        seed: int,
        device: torch.device,
        faults: FaultInjector,
        store: Callable[[], Store],
        check: Callable[[], None],
        check_whole: Callable[[], None],
        groups: RecoveryGroups,
    ):
        self.groups = groups
        """By which stages replay together: what is sent inside of one is sent in a replay as well."""
        self.logged_groups = LoggedGroups(rank, groups)
        """By which it is logged; not always the same ones (`swift.recovery.regroup`)."""
        self.logged_by = self.logged_groups.at(0)
        self.unsettled = False
        """(staggering) The step under way may be of a state that is taken back: it is not logged."""
        """In the step under way."""
        self._rank = rank
        self._assignment = assignment
        self._origin = assignment.slots[rank].dp_rank
        self.randomness = Randomness(seed, self._origin, device)
        self._device = device
        self._faults = faults
        self._in_microbatch = 0
        """Whose forward or backward is under way, for failures."""
        self.shapes = Shapes(store, self._origin, check)
        self._check_whole = check_whole  # raises RuntimeError if a collective was broken
        self._check = check  # raises Interrupted once a newer generation is published
        self._opened: Capture | None = None
        self._reader: LogReader | None = None
        self._cursors: dict[str, StreamCursor] = {}
        self._share: ReadFilter | None = None
        self._replay_from = 0
        self._collective_sources: Sequence[int] = ()
        self._step = 0
        self._ordinals: dict[int, int] = {}
        self._microbatch = 0
        self.off_log = False
        """What this rank has become is not what the log leads to: what it sends is neither compared nor logged, until
        it has another state or the log begins anew."""
        self.finishes_cut_steps = False
        """A notice takes nobody out of a step that computes (`swift.runtime.cut_step`): what the log does not take from
        then on is not missed, because nothing is replayed."""
        self.records_read = 0
        self.microbatches_replayed = 0
        self._watched = False  # or it is known that nobody looks
        self._witness: Witness | None = None
        self.rehearsing = False
        """The step under way is taken back (`swift.runtime.rehearsal`): nothing of it is logged."""
        self.profile = StepProfile(self._rank)
        self.clock = ReplayClock()
        """(replay) Of the trainer's thread."""
        self._replayed_too: Mapping[int, int] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def replaying(self) -> bool:
        return self._reader is not None

    @property
    def step(self) -> int:
        """The step under way."""
        return self._step

    @property
    def origin(self) -> int:
        """The data-parallel rank whose batch is computed."""
        return self._origin

    @contextmanager
    def as_origin(self, origin: int) -> Iterator[None]:
        """What is computed in here is of that data-parallel rank's batch."""
        own = self._origin
        self._be(origin)
        try:
            yield
        finally:
            self._be(own)

    def _be(self, origin: int) -> None:
        self._origin = self.randomness.dp_rank = self.shapes.dp_rank = origin

    def stream(self, stage: int, kind: str, rank: int | None = None) -> str:
        """The name of a boundary's stream in this rank's pipeline, or in another one's."""
        origin = self._origin if rank is None else self._assignment.slots[rank].dp_rank
        return streams.boundary(stage, kind, origin, self._assignment.dp_size)

    def rank_at(self, pipeline_rank: int) -> int:
        """Of this rank's pipeline."""
        return self._assignment.at(pipeline_rank, self._origin)

    def watch(self, witness: Witness | None) -> None:
        """(before anything passes) Who is shown what passes; None: nobody."""
        if self._watched:
            raise AssertionError("Channel.watch was called before")
        self._watched, self._witness = True, witness

    @property
    def witness(self) -> Witness | None:
        if not self._watched:
            raise AssertionError("Channel.watch was not called: nobody would see what passes")
        return self._witness

    def open(self, writer: Writer) -> None:
        """(once) What passes goes into this log."""
        if self._opened is not None:
            raise AssertionError("Channel.open: the log is open already")
        self._opened = capture_for(writer, self._device)

    def keep_nothing(self) -> None:
        """(a warm-up, once) As `open`, without a log."""
        self._opened = NoCapture()

    @property
    def _capture(self) -> Capture:
        if self._opened is None:
            raise AssertionError("Channel.open was not called: nothing would be logged")
        return self._opened

    def settle(self) -> None:
        """After this the memory of all that was sent may be used again."""
        self._capture.settle()

    def drop_step(self) -> None:
        """What the step has lent is not looked at any more: whoever does the step again compares it."""
        self._capture.drop()

    def begin_step(self, step: int) -> None:
        self._step = self.randomness.step = step
        self._ordinals = {}
        # What replays side by side feeds each other through the log, whatever is wanted of it later.
        self.logged_by = self.logged_groups.at(step, [self.groups] if self.replaying else [])
        self.profile.begin()
        for cursor in self._cursors.values():
            cursor.drop_below(step)  # what was sent to other stages is never asked for, and would stay

    # --- replay ---

    def begin_replay(
        self,
        reader: LogReader,
        from_step: int,
        collective_sources: Sequence[int],
        replayed_too: Mapping[int, int] = {},
    ) -> None:
        """`collective_sources`: ranks whose logs have the results of the collectives that they took part in, the best
        first. `replayed_too`: other stages that replay, and from which step on."""
        self._reader = reader
        self._replayed_too = replayed_too
        self._replay_from = from_step
        self._collective_sources = collective_sources
        self.records_read = 0
        self.microbatches_replayed = 0
        self.clock = ReplayClock()

    def end_replay(self) -> None:
        self._reader = None
        self.want(None, self._replay_from)

    def want(self, share: ReadFilter | None, from_step: int) -> None:
        """(replay) From this step on, nothing of stages but this share will be asked for. What was prefetched is
        forgotten."""
        self._share = share
        self._replay_from = from_step
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()

    def read_ahead(self, names: Iterable[str]) -> None:
        """(replay) These streams will be asked for: all are read from here on, at the same time."""
        for name in names:
            with suppress(RecordMissing):  # no server has anything of it yet
                self._cursor(name, self._share if name[-1] in streams.KINDS else None)

    def beside(self, capture: Capture) -> "Channel":
        """Another one, for a stage that is replayed here for its owner; what it sends goes to `capture`."""
        other = copy.copy(self)
        other._opened = capture
        other._witness = None  # it looks at this rank's own stages
        other._cursors = {}
        other.clock = ReplayClock()
        other.shapes = self.shapes.for_helper()
        other.randomness = copy.copy(self.randomness)
        other.off_log = False  # whatever this rank's own state is
        other.profile = StepProfile(self._rank)
        return other

    def receive(self, stage: int, direction: str, microbatch: int, slot: int, buffer: torch.Tensor) -> None:
        """(replay) Fills a receive buffer with what `stage` sent. Waits for a record that is still to come."""
        stream = self.stream(stage, direction)
        too = self._step >= self._replayed_too.get(stage, self._step + 1)
        record = self._read(stream, RecordKey(self._step, microbatch, slot), self._share, replayed_too=too)
        fill(buffer, record, f"{stream}@{self._step} microbatch {microbatch}")

    def external(self, stage: int, kind: str, microbatch: int, slot: int) -> torch.Tensor:
        """(replay for another rank) What entered the stage from outside, as its owner has logged it."""
        key = RecordKey(self._step, microbatch, slot)
        return to_tensor(self._read(self.stream(stage, kind), key, self._share)).to(self._device)

    def _cursor(self, stream: str, share: ReadFilter | None) -> StreamCursor:
        assert self._reader is not None
        cursor = self._cursors.get(stream)
        if cursor is None:
            cursor = self._cursors[stream] = self._reader.follow(stream, self._replay_from, share)
        return cursor

    def _read(
        self, stream: str, key: RecordKey, share: ReadFilter | None = None, *, replayed_too: bool = False
    ) -> Any:
        cursor = self._cursor(stream, share)
        began = time.perf_counter()
        try:
            record = cursor.get(key, RECORD_TIMEOUT_S, self._cancelled)
        except RecordMissing as error:
            raise ReplayRefused(f"{stream} has no record {key} and nobody wrote it: {error}") from None
        finally:
            self._check()  # a wait that was cancelled ends as Interrupted, whatever the cursor raised
        waited_s = time.perf_counter() - began
        self.clock.read(waited_s, replayed_too=replayed_too)
        if not replayed_too:
            self.profile.read(record.body.nbytes, waited_s)
        self.records_read += 1
        return record

    def _cancelled(self) -> bool:
        try:
            self._check()
        except Interrupted:
            return True
        return False

    # --- what the stages tell ---

    def logs(self, source: int, destination: int) -> bool:
        """What the first stage sends to the other one in this step is logged."""
        return any(groups.crosses(source, destination) for groups in self.logged_by)

    def entered(self, stage: int, microbatch: int, external: list[torch.Tensor]) -> None:
        """A forward begins: what enters from outside is recorded, the generator is set to its counter."""
        self._microbatch = microbatch
        for slot, tensor in enumerate(external):
            self.saw(INPUT, stage, microbatch, slot, tensor)
            self._record(self.stream(stage, "X"), RecordKey(self._step, microbatch, slot), tensor, now=True)
        self.randomness.forward(stage, microbatch)

    def targeted(self, stage: int, target: torch.Tensor) -> None:
        """The loss of the microbatch that was just computed is taken against `target`."""
        key = RecordKey(self._step, self._microbatch, 0)
        self.saw(TARGET, stage, self._microbatch, 0, target)
        self._record(self.stream(stage, "T"), key, target, now=True)

    def saw(self, kind: str, stage: int, microbatch: int, slot: int, tensor: torch.Tensor) -> None:
        witness = self.witness
        if witness is not None:
            witness.saw(kind, stage, microbatch, slot, tensor)

    def lost(self, stage: int, loss: torch.Tensor) -> None:
        """What the loss function gave for the microbatch that was just computed."""
        self.saw(LOSS, stage, self._microbatch, 0, loss)

    def sent(self, stage: int, direction: str, microbatch: int, slot: int, tensor: torch.Tensor) -> None:
        witness = self.witness
        if witness is not None and witness.thorough:
            place = (slot << 1) + (direction == BACKWARD)
            witness.saw(SENT, stage, microbatch, place, tensor)
        if self.off_log:
            return
        key = RecordKey(self._step, microbatch, slot)
        self._record(self.stream(stage, direction), key, tensor, now=False)

    def hand_in(self, stream: str, key: RecordKey, tensor: torch.Tensor) -> None:
        """(replay) What a helper has computed, and the log lacks."""
        self._record(stream, key, tensor, now=True)

    @contextmanager
    def computing(self, stage: int, direction: str, microbatch: int = 0) -> Iterator[None]:
        """Around what a stage computes for one microbatch."""
        self._in_microbatch = microbatch
        began = time.perf_counter()
        with self.profile.computing(stage, direction):
            yield
        self.clock.computed(time.perf_counter() - began)

    def computed(self, direction: str, microbatch: int) -> None:
        """A microbatch has done a forward, a backward, or gradients of weights apart: the place where drills kill."""
        if self.replaying:
            if direction == WEIGHTS:
                return
            if direction == FORWARD:
                self.microbatches_replayed += 1
            self._faults.replaying(self._step, microbatch)
        else:
            self._faults.at(_PHASES[direction], self._step, microbatch)

    def fails_at_layers(self, module: torch.nn.Module) -> None:
        """(session) A stage's or a whole module: a place inside of it where failures are injected, if they are to be.
        A hook on the module does it, and only then."""
        for name in self._faults.layers:
            layer_faults.watch(module, name, lambda phase, name=name: self._at_layer(phase, name))  # type: ignore[misc]

    def _at_layer(self, phase: str, layer: str) -> None:
        if not self.replaying:
            self._faults.at(phase, self._step, self._in_microbatch, layer=layer)

    def inferring(self) -> None:
        """A stage is about to learn its shapes: a place where tests kill."""
        self._faults.at("shapes", self._step)

    def settling(self, step: int) -> None:
        """What came of that step's vote is known, and not yet looked at: a place where tests kill."""
        self._faults.at("settle", step)

    def taking_back(self, version: int) -> None:
        """A rank is about to go back to that version: a place where tests kill."""
        self._faults.at("take_back", version)

    def _record(self, stream: str, key: RecordKey, tensor: torch.Tensor, now: bool) -> None:
        """``now``: it may change after the call."""
        self._check_whole()
        if self.rehearsing or self.unsettled:
            return
        if now:
            self.profile.beside(tensor.nbytes)
        if any(groups.logs for groups in self.logged_by):
            self.profile.logged(stream, tensor.nbytes)
            try:
                self._capture.record(stream, key, tensor, now=now, keep=self.replaying)
            except LogInterrupted:
                if not self.finishes_cut_steps:
                    raise

    # --- crossing collectives ---

    def collective(
        self, name: str, run: Callable[[], torch.Tensor], ranks: Sequence[int] = ()
    ) -> torch.Tensor:
        """The result of `run()`, recorded; in a replay the recorded result, and `run` is not called.

        `ranks`: those that take part and get the same; empty: all."""
        key = self._collective_key(ranks)
        if self.replaying:
            result = to_tensor(self._result(name, ranks, key)).to(self._device)
        else:
            self._check_before_collective()
            result = run()
        self.profile.settled()
        self._gave(key, result)
        return result

    def collective_into(
        self, name: str, results: Sequence[torch.Tensor], run: Callable[[], None], ranks: Sequence[int]
    ) -> None:
        """As `collective`, of a `run()` that leaves its result in `results`."""
        keys = [self._collective_key(ranks) for _ in results]
        if self.replaying:
            for key, result in zip(keys, results, strict=True):
                fill(result.detach(), self._result(name, ranks, key), f"collective {name!r}@{self._step}")
        else:
            self._check_before_collective()
            run()
        self.profile.settled()
        for key, result in zip(keys, results, strict=True):
            self._gave(key, result.detach())

    def _collective_key(self, ranks: Sequence[int]) -> RecordKey:
        """Each group of ranks counts its own: others may have fewer, or more."""
        number = 0
        if len(ranks) not in (0, len(self._assignment.slots)):
            number = 1 + zlib.crc32(",".join(map(str, sorted(ranks))).encode()) % (1 << 31)
        ordinal = self._ordinals.get(number, 0)
        self._ordinals[number] = ordinal + 1
        return RecordKey(self._step, number, ordinal)

    def _check_before_collective(self) -> None:
        self._check()
        self._check_whole()  # what this rank gives to others is as good as what it keeps

    def _result(self, name: str, ranks: Sequence[int], key: RecordKey) -> Any:
        """(replay) As a rank that took part has logged it."""
        source = next((rank for rank in self._collective_sources if not ranks or rank in ranks), None)
        if source is None:
            raise ReplayRefused(f"no living rank has the results of collective {name!r} in step {self._step}")
        return self._read(streams.collectives(source), key)

    def _gave(self, key: RecordKey, result: torch.Tensor) -> None:
        self.saw(RESULT, 0, key.microbatch, key.slot, result)
        self._record(streams.collectives(self._rank), key, result, now=True)
