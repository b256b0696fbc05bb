"""Tensors that cross a rank's boundaries: recorded while it trains, read from the log while it replays.

Streams are named by stage and data-parallel rank (`swift_ft.log.record`). Each has one writer. A record's key is (step,
microbatch, slot).

A replay runs the trainer's own step. The step's receives are read from the log. Its sends are compared with the logged
record ("verify"), or logged where the log has none ("fill") because the dead process had not sent it yet. So two ranks
that replay at the same time feed each other through the log.
"""

import copy
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from swift_ft import torch_private
from swift_ft.comm.process_groups import Interrupted
from swift_ft.device import Accelerator, Event, Readings, accelerator_of, surely
from swift_ft.errors import LogInterrupted, RecordMissing, ReplayRefused, ServiceError, UsageError
from swift_ft.log import record as streams
from swift_ft.log.reader import LogReader, ReadFilter, StreamCursor
from swift_ft.log.record import Record, RecordKey
from swift_ft.log.ring import CONTROL_BYTES, body_at, make_padding
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.planner.assignment import Assignment
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.state.rng import Randomness
from swift_ft.state.tensors import dtype_name, fill, plain, to_tensor
from swift_ft.state.transfer import local
from swift_ft.train.fault_points import FaultInjector
from swift_ft.train.profiling import BACKWARD, FORWARD, WEIGHTS, StepProfile
from swift_ft.train.step_digests import Witness
from swift_ft.train.transcript import INPUT, LOSS, RESULT, SENT, TARGET

# Copying tensors from the training path into the log's queue. The channel selects the tensors, a capture copies them:
#
#     HostCapture     CPU: lends the tensor to the ring's copier, which reads it while the trainer goes on
#     DeviceCapture   accelerators: a side stream copies into the ring's own memory, which is pinned
#
# The training path never waits for a device::
#
#     (record)  side stream waits for the work queued on the training stream → copies → an event after the copy
#     (record, later)  events are polled; records whose event is over are published, in order, whole
#     (wait_copied)  the training stream waits on the device for the newest event of a tensor that is lent: later work
#                    may overwrite it. What may change before that is copied on the device, and its copy is recorded
#
# Tests of DeviceCapture run on the simulated device (`tests/device/test_capture.py`), and the same functions on CUDA
# where there is one (`tests/gpu`).

_COPIED_WITHIN_S = 60.0
_POLL_S = 0.0005


class Capture:
    """Interface through which the channel logs tensors. Called by the trainer's thread. This one, of a process that is
    no rank, logs none."""

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """Logs `tensor`. ``now``: it may change after the call. ``keep``: the record is never dropped."""

    def wait_copied(self) -> None:
        """Makes recorded tensors safe to overwrite. Raises UsageError if one was overwritten before."""

    def drop(self) -> None:
        """Like `wait_copied`, for a step that is dropped: does not check for overwritten tensors."""


class _Lent(NamedTuple):
    end: int
    """Ring position of the record's end: the tensor has been copied once the ring's copier has reached it."""
    tensor: torch.Tensor
    version: int
    stream: str
    key: RecordKey

    def check(self) -> None:
        if self.tensor._version != self.version:
            raise UsageError(
                f"{self.stream} {self.key}: the tensor was changed in place after it was sent, so what was logged "
                "may not be what was sent; let the stage return a copy of it (.clone())"
            )


class HostCapture(Capture):
    def __init__(self, writer: SidecarWriter) -> None:
        self._writer = writer
        self.lent: deque[_Lent] = deque()

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        flat = plain(tensor)
        now = now or flat.is_inference()  # inference tensors have no version counter
        version = 0 if now else flat._version
        name, shape = dtype_name(tensor), tuple(tensor.shape)
        end = self._writer.append_at(stream, key, name, shape, flat.data_ptr(), flat.nbytes, now, keep=keep)
        if end >= 0 and not now:
            self.lent.append(_Lent(end, flat, version, stream, key))
            self._release_copied(self._writer.copied)

    def wait_copied(self) -> None:
        if self.lent:
            self._writer.wait_copied()
            self._release_copied(self.lent[-1].end)

    def drop(self) -> None:
        self._writer.wait_copied()
        self.lent.clear()

    def _release_copied(self, copied: int) -> None:
        while self.lent and self.lent[0].end <= copied:
            self.lent.popleft().check()


class _UnderWay(NamedTuple):
    end: int
    size: int
    reached: Event
    """The device has computed the tensor."""
    event: Event
    is_whole: Callable[[], bool]
    """(the event is over) Returns whether it was computed with whole messages. `surely`: no message was under way."""

    def may_wait_for_a_peer(self) -> bool:
        """Returns whether a message holds the tensor up, and no abort is going to end it."""
        return self.is_whole is not surely and not self.reached.query() and self.is_whole()


class DeviceCapture(Capture):
    """A capture that copies a device's tensors into the ring.

    The ring's head passes a record once its event is over and all records before it are complete. So a record is in
    the ring whole or not at all, and copies under way are lost if the trainer dies. A CPU tensor is copied by the
    caller: lent to the copier, it could be released only after the device's records before it.

    A message that an abort has ended leaves garbage, and what was computed with it is not logged: the fabric says so
    before the device goes on, and is asked once the copy is over.
    """

    def __init__(
        self,
        writer: SidecarWriter,
        device: Accelerator,
        wholeness: Callable[[], Callable[[], bool]] = lambda: surely,
    ) -> None:
        """`wholeness`: `Readings.wholeness`."""
        self._writer = writer
        self._device = device
        self._wholeness = wholeness
        self._side = device.new_stream()
        self._host = HostCapture(writer)
        self._under_way: deque[_UnderWay] = deque()
        self._lent: deque[_Lent] = deque()
        self._lent_until: Event | None = None
        """The newest copy of a lent tensor is over."""
        self._memory, self._producer = writer.lend_ring(self)
        self._unpin = device.pin(self._memory.address + CONTROL_BYTES, self._memory.capacity)
        self._ring = torch.frombuffer(self._memory.data, dtype=torch.uint8)

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """Like `Capture.record`. Copies on the side stream and holds the tensor until the copy's event is over."""
        self._publish()
        if tensor.device.type == "cpu":
            self._host.record(stream, key, tensor, now=True, keep=keep)
            return
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if changing := now or flat.is_inference():
            flat = self._own(flat)  # before a place in the ring is taken: memory may be used up
        size = flat.nbytes
        end = self._writer.append_at(stream, key, dtype_name(tensor), tuple(tensor.shape), 0, size, keep=keep)
        if end < 0 or not size:
            return
        at = body_at(self._memory, end, size)
        source = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
        reached = self._device.copy_out(self._ring[at : at + size], source, self._side)
        event = self._device.mark(self._side)
        self._under_way.append(_UnderWay(end, size, reached, event, self._wholeness()))
        if not changing:
            self._lent_until = event
            self._lent.append(_Lent(end, flat, flat._version, stream, key))

    @staticmethod
    def _own(tensor: torch.Tensor) -> torch.Tensor:
        """Copies what may change after the call, on the device: training would have to wait for a copy to the host."""
        return tensor.clone()

    def wait_copied(self) -> None:
        self._publish()
        if self._lent_until is not None:
            self._device.hold(self._lent_until)
            self._lent_until = None
        while self._lent:
            self._lent.popleft().check()

    def drop(self) -> None:
        self._lent.clear()
        self._writer.wait_copied()

    def finish(self, *, patient: bool = True) -> None:
        """(the writer, off the training path) Waits until all copies under way are published. Raises ServiceError if
        the device takes too long for one. A device that may wait for a peer has as long as it likes if `patient`: until
        an abort is asked for."""
        self._publish()
        oldest, deadline = None, 0.0
        while self._under_way:
            first = self._under_way[0]
            if first is not oldest or (patient and first.may_wait_for_a_peer()):
                oldest, deadline = first, time.monotonic() + _COPIED_WITHIN_S
            elif time.monotonic() > deadline:
                raise ServiceError(f"the device has not copied a tensor within {_COPIED_WITHIN_S:g} s")
            time.sleep(_POLL_S)
            self._publish()

    def _publish(self) -> None:
        """Publishes the copies that are complete. Does not wait."""
        end = -1
        while self._under_way and self._under_way[0].event.query():
            copied = self._under_way.popleft()
            end = copied.end
            if not copied.is_whole():
                make_padding(self._memory, end, copied.size)
        if end >= 0:
            self._producer.complete(end)
        while self._lent and self._lent[0].end <= end:
            self._lent.popleft().check()

    def stop_writing(self) -> None:
        """(the writer is closed) Ends all writes into the ring's memory and unpins it."""
        self._lent.clear()
        with suppress(ServiceError):  # a device that hangs, or waits for a peer, ends with this process
            self.finish(patient=False)
        self._under_way.clear()
        self._unpin()
        del self._ring


class Captures(Capture):
    """The capture of a rank: a device's from its first tensor of a device on. A trainer may set its device up after the
    log is open."""

    def __init__(self, writer: SidecarWriter, wholeness: Callable[[], Callable[[], bool]]) -> None:
        self._writer = writer
        self._wholeness = wholeness
        self._chosen: HostCapture | DeviceCapture = HostCapture(writer)

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        if tensor.device.type != "cpu" and isinstance(self._chosen, HostCapture):
            self._chosen.wait_copied()
            self._chosen = DeviceCapture(self._writer, accelerator_of(tensor.device), self._wholeness)
        self._chosen.record(stream, key, tensor, now=now, keep=keep)

    def wait_copied(self) -> None:
        self._chosen.wait_copied()

    def drop(self) -> None:
        self._chosen.drop()


# Fault injection at a layer: after the forward of a module inside of a stage, and before its backward.


def watch(module: torch.nn.Module, name: str, reached: Callable[[str], None]) -> None:
    """Calls ``reached("forward")`` after the forward of the submodule of that name, and ``reached("backward")`` once
    the gradient of its output is known, before its own backward. Has no effect if the module has no such submodule:
    another stage of the rank may have it. Does not change the bits of any result."""
    layer = dict(module.named_modules()).get(name)
    if layer is None:
        return

    def forward(_args: Any, output: Any) -> None:
        given = output.values() if isinstance(output, Mapping) else output
        for tensor in [given] if isinstance(given, torch.Tensor) else given:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _gradient: reached("backward"))  # type: ignore[no-untyped-call]
                break
        reached("forward")

    layer.register_forward_hook(torch_private.ModuleHook(forward))


# Shapes of the tensors between the stages of a pipeline, exchanged through the job's store.
#
# torch's stages infer them in the first call of a schedule, and again when it switches between training and
# evaluation, all stages in the same call: so evaluation may have another batch size. A replacement process infers them
# in a call in which no other stage does. So an inference is identified by its *point*, the step and call in which it
# was due. The first stage keeps the list of points, and shapes are stored under their point.
#
#     (all, before they infer in a call)  the newest point at or before it has this mode: use that point
#                                         else: the first stage adds this call as a point, the others wait for it
#
# Each pipeline has its own points. In a degraded world no pipeline may be complete: then all pipelines infer together,
# with the batches of the ranks that are present (`Shapes.together`). Those points stay valid for every pipeline.

_TIMEOUT_S = 600.0
_SHAPE_POLL_S = 0.02
POINTS_MAX = 1024
"""Points that are kept. Older ones are deleted: no checkpoint is so old."""


class Point(NamedTuple):
    """The step and call in which shapes were inferred. Ordered by step and call."""

    step: int
    call: int
    training: bool


class Shapes:
    """Shapes as one rank exchanges them with its pipeline; other pipelines may have other batch sizes.

    (stage) ``infer`` → ``put``, ``get`` until the next inference
    """

    def __init__(self, store: Callable[[], Store], dp_rank: int, check: Callable[[], None]):
        """`store` returns the store of this rank's generation. `check` raises once a newer one is published."""
        self._store = store
        self.dp_rank = dp_rank
        """Data-parallel rank whose batch is computed."""
        self._check = check
        self._point = Point(0, 0, training=True)
        self._list = ""
        """Name of the list that holds `_point`."""
        self.together = False
        """All pipelines infer in the same call, or none does, because some of their ranks may be missing. Points of a
        single pipeline are ignored: a rank that knows them does not publish them, and one that did may be lost."""
        self._filed: dict[str, deque[str]] = {}
        self._helps = False
        self.schedule = 0
        """Index of the running schedule: each switches between training and evaluation by itself."""

    def for_helper(self) -> "Shapes":
        """Returns a copy for replaying another rank's stages: uses training points only, of any call of the step."""
        other = copy.copy(self)
        other._helps = True
        return other

    def infer(self, step: int, call: int, *, training: bool, first: bool) -> None:
        """Selects the point before a stage infers; waits for the first stage to add it. `first`: the stage is the
        pipeline's first one. Raises ServiceError after a timeout."""
        now = Point(step, call, training)
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._at(now):
            if first and not self._helps:
                self._add(now)
            else:
                self._wait(f"the first stage has inferred no shapes in call {call} of step {step}", deadline)

    def put(self, kind: str, one: int, other: int, value: Any) -> None:
        key, link = self._key(kind, one, other), f"{kind}/{one}-{other}"
        self._store().set(key, json.dumps(value))
        filed = self._filed.setdefault(link, deque())
        if key not in filed:
            filed.append(key)
        if len(filed) > POINTS_MAX:
            self._store().delete_key(filed.popleft())

    def get(self, kind: str, one: int, other: int) -> Any:
        """Waits until stage `one` has published the value, and returns it. Raises ServiceError after a timeout."""
        key = self._key(kind, one, other)
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._store().check([key]):
            self._wait(f"no neighbour has published the shapes of {key}", deadline)
        return json.loads(self._store().get(key))

    def _at(self, now: Point) -> bool:
        """Selects the point that is valid now. Returns whether there is one."""
        lists = [self._list_of("all"), *([] if self.together else [self._list_of(self.dp_rank)])]
        points = [(point, name) for name in lists for point in self._points(name)]
        if self._helps:
            before = [(point, name) for point, name in points if point.step <= now.step and point.training]
        else:
            before = [(point, name) for point, name in points if point[:2] <= now[:2]]
        newest, name = max(before, default=(None, ""))
        if newest is None or newest.training != now.training:
            return False
        self._point, self._list = newest, name
        return True

    def _add(self, now: Point) -> None:
        name = self._list_of("all" if self.together else self.dp_rank)
        kept = [point for point in self._points(name) if point[:2] != now[:2]]
        self._store().set(name, json.dumps(sorted([*kept, now])[-POINTS_MAX:]))

    def _points(self, name: str) -> list[Point]:
        if not self._store().check([name]):
            return []
        return [Point(*each) for each in json.loads(self._store().get(name))]

    def _list_of(self, pipeline: int | str) -> str:
        return f"shapes/{pipeline}/{self.schedule}"

    def _key(self, kind: str, one: int, other: int) -> str:
        point = self._point
        return f"{self._list}/{point.step}.{point.call}.{int(point.training)}/{kind}/{one}-{other}"

    def _wait(self, why: str, deadline: float) -> None:
        """Sleeps for one poll, so that a newer generation can end the wait. Raises ServiceError after the deadline."""
        self._check()
        if time.monotonic() > deadline:
            raise ServiceError(f"{why} in {_TIMEOUT_S:g} s")
        time.sleep(_SHAPE_POLL_S)


_PHASES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weights"}

# A replay gives up on a record after this time: by then its writer would have been declared dead.
RECORD_TIMEOUT_S = 120.0


class Channel:
    """The boundaries of one rank: logs what crosses them, or answers from the log in a replay.

    (session) sets `witness`, `capture`; per step ``begin_step``; around a replay ``begin_replay``, ``end_replay``
    (stages) ``entered``, ``receive``, ``sent``, ``targeted``, ``computed``
    (session, for the trainer) ``collective``
    (engine, stages, updates) ``wait_copied`` before memory is reused

    A tensor sent to another stage is *lent* to the ring: a native thread copies it while the trainer computes, and it
    is kept alive. That is safe because torch's own asynchronous send borrows it as well, and because whatever may
    overwrite it calls `wait_copied` first: the next call of the schedule (receive buffers, of which an activation may
    be a view), the optimizer (a stage may send a view of a parameter), the end of a step. If the trainer changes the
    tensor in place before that, its version counter shows it. The trainer's thread copies everything else at once:
    external inputs and targets, which are small and may be changed in place by a module or a loader, and results of
    collectives, which the trainer keeps.
    """

    def __init__(
        self,
        rank: int,
        assignment: Assignment,
        seed: int,
        faults: FaultInjector,
        store: Callable[[], Store],
        check: Callable[[], None],
        check_whole: Callable[[], None],
        groups: RecoveryGroups,
    ):
        self.groups = groups
        """Recovery groups. Sends inside of a group are not logged: its stages replay together and send them again."""
        self.unsettled = False
        """(staggering) The state of the step under way may be taken back, so the step is not logged."""
        self.rank = rank
        self._assignment = assignment
        self._origin = assignment.slots[rank].dp_rank
        self.randomness = Randomness(seed, self._origin // assignment.tensor)
        self.readings = Readings()
        self.faults = faults
        self._in_microbatch = 0
        """Microbatch whose forward or backward is under way; for fault injection."""
        self.shapes = Shapes(store, self._origin, check)
        self.check_whole = check_whole
        """Raises RuntimeError if a collective was broken."""
        self.check = check
        """Raises Interrupted once a newer generation is published."""
        self.capture: Capture
        """(a rank) set once its log is open; (a process that is no rank) logs nothing"""
        self._to_record: deque[tuple[str, RecordKey, torch.Tensor]] = deque()
        """Sent tensors whose messages are about to be launched."""
        self._reader: LogReader | None = None
        self._cursors: dict[str, StreamCursor] = {}
        self._share: ReadFilter | None = None
        self._replay_from = 0
        self._collective_sources: Sequence[int] = ()
        self._reusable: Event | None = None
        """(replay on a device) Behind all work of earlier calls of the schedule, so behind the receive buffers' use."""
        self.step = 0
        self._ordinals: dict[int, int] = {}
        self._microbatch = 0
        self.finishes_cut_steps = False
        """A newer generation does not interrupt a step that computes (`swift_ft.train.lossy`). Records that the log
        refuses from then on are not needed, because such a job never replays."""
        self.records_read = 0
        self.microbatches_replayed = 0
        self.witness: Witness | None
        """Is shown every tensor. The session sets it before any passes; None for no witness."""
        self.rehearsing = False
        """The step under way is going to be taken back, so it is not logged (`swift_ft.train.batch_redistribution`, a
        warm-up)."""
        self.rehearsed = False
        """(a rehearsal) Messages inside of a recovery group are read as well, from this rank's own records."""
        self.giving_only: Callable[[], AbstractContextManager[None]] = nullcontext
        """(a rehearsal) Context for a collective whose result is read from the log."""
        self.profile = StepProfile()
        self._replayed_too: Mapping[int, int] = {}

    @property
    def replaying(self) -> bool:
        return self._reader is not None

    @property
    def origin(self) -> int:
        """The data-parallel rank whose batch is computed."""
        return self._origin

    @contextmanager
    def as_origin(self, origin: int) -> Iterator[None]:
        own = self._origin
        self._be(origin)
        try:
            yield
        finally:
            self._be(own)

    def _be(self, origin: int) -> None:
        self._origin = self.shapes.dp_rank = origin
        self.randomness.dp_rank = origin // self._assignment.tensor

    def stream(self, stage: int, kind: str, rank: int | None = None) -> str:
        origin = self._origin if rank is None else self._assignment.slots[rank].dp_rank
        return streams.boundary(stage, kind, origin, self._assignment.dp_size)

    def rank_at(self, pipeline_rank: int) -> int:
        return self._assignment.at(pipeline_rank, self._origin)

    def wait_copied(self) -> None:
        """Waits until the memory of all sent tensors may be reused."""
        self.launched()
        self.capture.wait_copied()
        self._reusable = None

    def drop_step(self) -> None:
        """Releases the step's lent tensors without checking them: the step is done again and compared then."""
        self.readings.drop()
        self._to_record.clear()
        self.capture.drop()

    def begin_step(self, step: int) -> None:
        self.step = self.randomness.step = step
        self._ordinals = {}
        self.profile.begin()
        for cursor in self._cursors.values():
            cursor.drop_below(step)  # records for other stages are never read, and would stay

    # --- replay ---

    def begin_replay(
        self,
        reader: LogReader,
        from_step: int,
        collective_sources: Sequence[int],
        replayed_too: Mapping[int, int] = {},
    ) -> None:
        """Reads from `reader` instead of receiving, from `from_step` on. `collective_sources`: ranks whose logs have
        the results of the collectives that they took part in, the best first. `replayed_too`: other stages that replay
        -> the step from which they do."""
        self._reader = reader
        self._replayed_too = replayed_too
        self._replay_from = from_step
        self._collective_sources = collective_sources
        self.records_read = 0
        self.microbatches_replayed = 0

    def end_replay(self) -> None:
        self._reader = None
        self.want(None, self._replay_from)

    def want(self, share: ReadFilter | None, from_step: int) -> None:
        """(replay) Limits reads of stages' streams to this share (None: no limit) from this step on. Discards what was
        prefetched."""
        self._share = share
        self._replay_from = from_step
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()

    def read_ahead(self, names: Iterable[str]) -> None:
        """(replay) Starts to prefetch these streams, all at the same time."""
        for name in names:
            with suppress(RecordMissing):  # no server has a record of it yet
                self._cursor(name, self._share if name[-1] in streams.KINDS else None)

    def beside(self, capture: Capture) -> "Channel":
        """Returns a second channel, for stages that this rank replays for their owner; its sends go to `capture`."""
        other = copy.copy(self)
        other.capture = capture
        other.witness = None  # the witness covers this rank's own stages only
        other._cursors = {}
        other._to_record = deque()
        other._reusable = None
        other.shapes = self.shapes.for_helper()
        other.randomness = copy.copy(self.randomness)
        other.profile = StepProfile()
        return other

    def received(self, stage: int, direction: str, microbatch: int, slot: int, buffer: torch.Tensor) -> None:
        """(a step that is recorded) Records what another stage of the recovery group sent: no other stream has it."""
        if self.witness is not None and self.witness.thorough and not self.replaying:
            self.note(streams.messages(self.rank), self._message_key(direction, microbatch, slot), buffer)

    def _message_key(self, direction: str, microbatch: int, slot: int) -> RecordKey:
        return RecordKey(self.step, 2 * microbatch + (direction == BACKWARD), slot)

    def receive(
        self, stage: int, direction: str, microbatch: int, slot: int, buffer: torch.Tensor, *, early: bool
    ) -> None:
        """(replay) Fills a receive buffer with the record of what `stage` sent. Waits if it is not written yet.
        `early`: the buffer is older than this call of the schedule, so a device fills it ahead of what is queued."""
        stream = self.stream(stage, direction)
        too = self.step >= self._replayed_too.get(stage, self.step + 1)
        record = self._read(stream, RecordKey(self.step, microbatch, slot), self._share, replayed_too=too)
        if early and self._reusable is None and buffer.device.type != "cpu":
            self._reusable = accelerator_of(buffer.device).mark()
        reusable = self._reusable if early else None
        fill(buffer, record, f"{stream}@{self.step} microbatch {microbatch}", reusable)

    def receive_inside(
        self, stage: int, direction: str, microbatch: int, slot: int, buffer: torch.Tensor
    ) -> None:
        """(rehearsal) Like `receive`, for a message that `received` has recorded."""
        record = self.recorded(streams.messages(self.rank), self._message_key(direction, microbatch, slot))
        fill(buffer, record, f"what stage {stage} sent in step {self.step}, microbatch {microbatch}")

    def external(
        self, stage: int, kind: str, microbatch: int, slot: int, device: torch.device
    ) -> torch.Tensor:
        """(replay for another rank) Returns an external input or target of the stage, as its owner has logged it."""
        key = RecordKey(self.step, microbatch, slot)
        return to_tensor(self._read(self.stream(stage, kind), key, self._share), device)

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
            self.check()  # a wait that was cancelled ends as Interrupted, whatever the cursor raised
        if not replayed_too:
            self.profile.read(record.body.nbytes, time.perf_counter() - began)
        self.records_read += 1
        return record

    def _cancelled(self) -> bool:
        try:
            self.check()
        except Interrupted:
            return True
        return False

    # --- called by the stages ---

    def entered(self, stage: int, microbatch: int, external: list[torch.Tensor]) -> None:
        """(a forward begins) Records the external inputs and sets the random generators for this microbatch."""
        self._microbatch = microbatch
        for slot, tensor in enumerate(map(local, external)):
            self.saw(INPUT, stage, microbatch, slot, tensor)
            self.record(self.stream(stage, "X"), RecordKey(self.step, microbatch, slot), tensor, now=True)
        self.randomness.forward(stage, microbatch)

    def targeted(self, stage: int, target: torch.Tensor) -> None:
        """Records the target of the microbatch whose forward has just ended."""
        key, target = RecordKey(self.step, self._microbatch, 0), local(target)
        self.saw(TARGET, stage, self._microbatch, 0, target)
        self.record(self.stream(stage, "T"), key, target, now=True)

    def saw(self, kind: str, stage: int, microbatch: int, slot: int, tensor: torch.Tensor) -> None:
        witness = self.witness
        if witness is not None:
            witness.saw(kind, stage, microbatch, slot, tensor)

    def lost(self, stage: int, loss: torch.Tensor) -> None:
        """Shows the witness the loss of the microbatch whose forward has just ended."""
        self.saw(LOSS, stage, self._microbatch, 0, local(loss))

    def sends(self, stage: int, direction: str, microbatch: int, slot: int, tensor: torch.Tensor) -> None:
        """Shows a thorough witness what a stage sends, also inside of a recovery group."""
        witness = self.witness
        if witness is not None and witness.thorough:
            place = (slot << 1) + (direction == BACKWARD)
            witness.saw(SENT, stage, microbatch, place, tensor)

    def sent(
        self,
        stage: int,
        direction: str,
        microbatch: int,
        slot: int,
        tensor: torch.Tensor,
        *,
        launched: bool = True,
    ) -> None:
        """Records what a stage sends. `launched`: False if its message is going to be: then once it is."""
        key = RecordKey(self.step, microbatch, slot)
        self._to_record.append((self.stream(stage, direction), key, tensor))
        if launched:
            self.launched()

    def launched(self) -> None:
        """(a message has been launched) Records what was sent. The message does not wait for that, and a rank that dies
        in between has only lost one record more: its replay makes those that lack."""
        while self._to_record:
            self.record(*self._to_record.popleft(), now=False)

    @contextmanager
    def computing(self, stage: int, direction: str, microbatch: int = 0) -> Iterator[None]:
        """Returns a context that measures what a stage computes for one microbatch."""
        self.launched()  # the latest: what is computed may change what was sent
        self._in_microbatch = microbatch
        with self.profile.computing(stage, direction):
            yield

    def computed(self, direction: str, microbatch: int) -> None:
        """(after a forward, a backward, or a separate weight-gradient part of a microbatch) Injects a fault if due."""
        if self.replaying:
            if direction == WEIGHTS:
                return
            if direction == FORWARD:
                self.microbatches_replayed += 1
            self.faults.replaying(self.step, microbatch)
        else:
            self.faults.at(_PHASES[direction], self.step, microbatch)

    def fails_at_layers(self, module: torch.nn.Module, *, whole: bool) -> None:
        """(session) Prepares fault injection at layers inside of `module`. Registers a forward hook on each layer of
        the module that has a planned fault, and none otherwise. `whole`: on the module itself, too, because it is no
        stage of a pipeline, which calls `computed`."""
        for name in self.faults.layers:
            if name or whole:
                watch(module, name, lambda phase, name=name: self._at_layer(phase, name))  # type: ignore[misc]

    def _at_layer(self, phase: str, layer: str) -> None:
        if not self.replaying:
            self.faults.at(phase, self.step, self._in_microbatch, layer=layer)

    def recorded(self, stream: str, key: RecordKey) -> Record:
        """(rehearsal) Returns the record that this rank has noted under `key`. Waits for it."""
        record: Record = self._read(stream, key)
        return record

    def note(self, stream: str, key: RecordKey, tensor: torch.Tensor) -> None:
        """Records a tensor for a later rehearsal of this rank's step."""
        self.readings.check_arrived()
        self.check_whole()
        if not (self.rehearsing or self.unsettled):
            self.capture.record(stream, key, tensor, now=True, keep=False)

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool) -> None:
        """Logs `tensor`, unless the step may be taken back. ``now``: it may change after the call."""
        self.readings.check_arrived()  # a record of what an abort has left would differ from the repeated step's
        self.check_whole()
        if self.rehearsing or self.unsettled:
            return
        if now:
            self.profile.beside(tensor.nbytes)
        if self.groups.logs:
            try:
                self.capture.record(stream, key, tensor, now=now, keep=self.replaying)
            except LogInterrupted:
                if not self.finishes_cut_steps:
                    raise

    # --- pipeline collectives ---

    def collective(
        self, name: str, run: Callable[[], torch.Tensor], device: torch.device, ranks: Sequence[int] = ()
    ) -> torch.Tensor:
        """Returns the result of `run()` and records it. In a replay returns the recorded result without calling `run`.

        `device`: where `run` leaves it. `ranks`: ranks that take part and get the same result; empty: all."""
        key = self._collective_key(ranks)
        if self._answered:
            self._gives_again(run)
            result = to_tensor(self._result(name, ranks, key), device)
        else:
            self._check_before_collective()
            result = run()
        self.profile.mark_last_wait()
        self._gave(key, result)
        return result

    def collective_into(
        self, name: str, results: Sequence[torch.Tensor], run: Callable[[], None], ranks: Sequence[int]
    ) -> None:
        """Like `collective`, for a `run()` that writes its result into `results`."""
        keys = [self._collective_key(ranks) for _ in results]
        if self._answered:
            self._gives_again(run)
            for key, result in zip(keys, results, strict=True):
                fill(result.detach(), self._result(name, ranks, key), f"collective {name!r}@{self.step}")
        else:
            self._check_before_collective()
            run()
        self.profile.mark_last_wait()
        for key, result in zip(keys, results, strict=True):
            self._gave(key, result.detach())

    @property
    def _answered(self) -> bool:
        """Results of collectives are read from the log."""
        return self.replaying and not (self.rehearsed and not self.groups.logs)

    def _gives_again(self, run: Callable[[], Any]) -> None:
        """(rehearsal) Runs the collective for its inputs only, which are compared; its result is in the log."""
        if self.rehearsed:
            with self.giving_only():
                run()

    def _collective_key(self, ranks: Sequence[int]) -> RecordKey:
        """Returns the record key of the next collective. Each group of ranks counts its own collectives."""
        number = 0
        if len(ranks) not in (0, len(self._assignment.slots)):
            number = 1 + zlib.crc32(",".join(map(str, sorted(ranks))).encode()) % (1 << 31)
        ordinal = self._ordinals.get(number, 0)
        self._ordinals[number] = ordinal + 1
        return RecordKey(self.step, number, ordinal)

    def _check_before_collective(self) -> None:
        self.check()
        self.check_whole()  # do not spread the result of a broken collective to other ranks

    def _result(self, name: str, ranks: Sequence[int], key: RecordKey) -> Any:
        """(replay) Reads the result from the log of a rank that took part. Raises ReplayRefused if none has it."""
        source = next((rank for rank in self._collective_sources if not ranks or rank in ranks), None)
        if source is None:
            raise ReplayRefused(f"no living rank has the results of collective {name!r} in step {self.step}")
        return self._read(streams.collectives(source), key)

    def _gave(self, key: RecordKey, result: torch.Tensor) -> None:
        self.saw(RESULT, 0, key.microbatch, key.slot, result)
        self.record(streams.collectives(self.rank), key, result, now=True)
