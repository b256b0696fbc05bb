"""What crosses the boundaries of a rank: recorded while it runs, answered from the log while it replays.

Streams are named by stage and data-parallel rank (`swift_ft.log.record`), each has one writer. A record's key is (step,
microbatch, slot).

A replay runs the trainer's own step. What the step receives comes out of the log; what it sends is compared
with what was logged before ("verify") or logged where the log has a hole ("fill"): records that the dead
process had not got out. So two ranks that replay at once feed each other through the log.
"""

import copy
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import Store

from swift_ft.comm.process_groups import Interrupted
from swift_ft.errors import LogInterrupted, RecordMissing, ReplayRefused, ServiceError, UsageError
from swift_ft.log import record as streams
from swift_ft.log.reader import LogReader, ReadFilter, StreamCursor
from swift_ft.log.record import Record, RecordKey
from swift_ft.log.ring import CONTROL_BYTES, body_at
from swift_ft.log.sidecar_client import Writer
from swift_ft.log.writer import Lending
from swift_ft.planner.assignment import Assignment
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.state.rng import Randomness
from swift_ft.state.tensors import dtype_name, fill, owned_bytes, plain, to_tensor
from swift_ft.train.fault_points import FaultInjector
from swift_ft.train.profiling import WEIGHTS, StepProfile
from swift_ft.train.step_digests import Witness
from swift_ft.train.transcript import INPUT, LOSS, RESULT, SENT, TARGET

# Where the time of a replay goes: what each of its ranks waited for, and which of it set the pace. No torch.
#
# log        records that come out of the log
# neighbour  records that a stage beside this one, which replays as well, has yet to write
# line       weights on their way down, gradients on their way up, and whoever they wait for
# compute    forwards and backwards; of the owner the rest of its steps too, for which the others wait

LOG, NEIGHBOUR, LINE, COMPUTE = "log", "neighbour", "line", "compute"
BOTTLENECKS = (COMPUTE, LOG, NEIGHBOUR, LINE)


class ReplayClock:
    """Of one rank: the seconds of its trainer's thread, by what it did or waited for."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(BOTTLENECKS, 0.0)

    @contextmanager
    def line(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[LINE] += time.perf_counter() - began

    def computed(self, seconds: float) -> None:
        self.seconds[COMPUTE] += seconds

    def read(self, waited_s: float, *, replayed_too: bool) -> None:
        """A record has come. `replayed_too`: its writer does that step again at the same time."""
        self.seconds[NEIGHBOUR if replayed_too else LOG] += waited_s

    def told(self) -> dict[str, float]:
        return {name: round(seconds, 6) for name, seconds in self.seconds.items()}


def split(
    seconds: float, owner: Mapping[str, float], helpers: Mapping[int, Mapping[str, float]]
) -> dict[str, float]:
    """The `seconds` of a replay by what set the pace.

    The line waits for its busiest rank, the one that computed and waited for the log longest: its seconds of both
    count, and what its owner does besides, alone. What is left is the line's own: even the busiest rank waited then.
    """
    rest = max(0.0, seconds - sum(owner.values()))
    busiest = max([owner, *helpers.values()], key=lambda seconds_of: seconds_of[COMPUTE] + seconds_of[LOG])
    seconds_of = {
        COMPUTE: busiest[COMPUTE] + rest,
        LOG: busiest[LOG],
        NEIGHBOUR: owner[NEIGHBOUR],
    }
    seconds_of[LINE] = max(0.0, seconds - sum(seconds_of.values()))
    return {name: round(seconds_of[name], 6) for name in BOTTLENECKS}


def bottleneck(shares: Mapping[str, float]) -> str:
    """What took longest. Of equals what is first in BOTTLENECKS."""
    return max(BOTTLENECKS, key=lambda name: shares[name])


# How a tensor gets from the training path into the log's queue. The channel says what; here is how, by device.
#
#     CopyCapture     no ring: the caller copies
#     HostCapture     CPU: lent to the ring's copier, which reads it while the trainer goes on
#     DeviceCapture   CUDA: a side stream copies into the ring's own memory, which is pinned
#
# Nothing here waits for a device on the training path::
#
#     (record)  side stream waits for what the training stream was given → copies → an event behind the copy
#     (record, later)  events that are over are asked for; what they stand for is published, in order, whole
#     (settle)  the training stream waits for the newest event, on the device: what follows may overwrite the tensor
#
# Tests of the DeviceCapture run with a made-up device everywhere (`tests/unit/runtime/test_capture.py`), and with a
# CUDA device where there is one (`tests/gpu/test_capture.py`). No session uses it: pipelines are refused on anything
# but the CPU.

_COPIED_WITHIN_S = 60.0
_POLL_S = 0.0005


class Capture(Protocol):
    """What the channel needs. Called by the trainer's thread."""

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """Takes it into the log. ``now``: it may change after the call. ``keep``: it is never dropped."""

    def wait_copied(self) -> None:
        """What was recorded may be overwritten after this. UsageError: it was, before."""

    def drop(self) -> None:
        """As settle, of a step that is dropped: nothing is judged."""


class _Lent(NamedTuple):
    """A tensor that may not be copied yet."""

    end: int
    """Position in the ring that tells that it is."""
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


class NoCapture:
    """(a process that is no rank) Nothing is logged."""

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """It goes nowhere."""

    def wait_copied(self) -> None:
        """Nothing was lent."""

    drop = wait_copied


class CopyCapture:
    """Into a writer of this process."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        self._writer.append(stream, key, *owned_bytes(tensor), keep=keep)

    def wait_copied(self) -> None:
        """Nothing was lent."""

    drop = wait_copied


class HostCapture:
    """CPU tensors into the ring."""

    def __init__(self, writer: Lending) -> None:
        self._writer = writer
        self.lent: deque[_Lent] = deque()

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        flat = plain(tensor)
        now = now or flat.is_inference()  # nobody counts its versions
        version = 0 if now else flat._version
        name, shape = dtype_name(tensor), tuple(tensor.shape)
        end = self._writer.append_at(stream, key, name, shape, flat.data_ptr(), flat.nbytes, now, keep=keep)
        if end >= 0 and not now:
            self.lent.append(_Lent(end, flat, version, stream, key))
            self._take_back(self._writer.copied)

    def wait_copied(self) -> None:
        if self.lent:
            self._writer.wait_copied()
            self._take_back(self.lent[-1].end)

    def drop(self) -> None:
        self._writer.wait_copied()
        self.lent.clear()

    def _take_back(self, copied: int) -> None:
        while self.lent and self.lent[0].end <= copied:
            self.lent.popleft().check()


class Event(Protocol):
    """A point in a device's stream of work."""

    def query(self) -> bool:
        """Whether the device is past it. Does not wait."""


class Device(Protocol):
    """What is asked of a device. `Cuda`, or one that tests make up."""

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Makes host memory one that the device writes by itself; the result undoes that. ServiceError."""

    def follow(self) -> None:
        """The side stream goes on behind what the training stream was given so far."""

    def copy(self, to: torch.Tensor, tensor: torch.Tensor) -> None:
        """On the side stream, from the device to pinned memory. The tensor's memory is not given to others before."""

    def mark(self) -> Event:
        """Behind all that the side stream was given so far."""

    def hold(self, event: Event) -> None:
        """The training stream goes on behind the event. The host does not wait."""


class Cuda:
    """torch's. Streams and events of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, address: int, size: int) -> Callable[[], None]:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(cudart.cudaHostRegister(address, size, 0))
        if error:
            raise ServiceError(
                f"{size} bytes of the log's queue cannot be pinned (CUDA error {error}); give a smaller log_queue_bytes"
            )
        return lambda: cudart.cudaHostUnregister(address)

    def follow(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: torch.Tensor, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(self._side):
            to.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._side)

    def mark(self) -> Event:
        event: Event = self._side.record_event()
        return event

    def hold(self, event: Event) -> None:
        stream: Any = torch.cuda.current_stream(self._device)
        stream.wait_event(event)


class _UnderWay(NamedTuple):
    end: int
    event: Event


class DeviceCapture:
    """Tensors of a device into the ring.

    The ring's head passes a record once its event is over, and then only if it has passed all before. So a record is in
    the ring whole or not at all here as well, and a trainer that dies leaves those out that were under way. A tensor
    on the CPU is copied by the caller: lent to the copier, it could only be given back behind the device's.
    """

    def __init__(self, writer: Lending, device: Device) -> None:
        self._writer = writer
        self._device = device
        self._host = HostCapture(writer)
        self._under_way: deque[_UnderWay] = deque()
        self._lent: deque[_Lent] = deque()
        self._memory, self._producer = writer.lend_ring(self)
        self._unpin = device.pin(self._memory.address + CONTROL_BYTES, self._memory.capacity)
        self._ring = torch.frombuffer(self._memory.data, dtype=torch.uint8)

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """As `Capture.record`. The copy runs on the side stream, so the tensor is held until its event is over."""
        self._publish()
        if tensor.device.type == "cpu":
            self._host.record(stream, key, tensor, now=True, keep=keep)
            return
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        size = flat.nbytes
        end = self._writer.append_at(stream, key, dtype_name(tensor), tuple(tensor.shape), 0, size, keep=keep)
        if end < 0 or not size:
            return
        at = body_at(self._memory, end, size)
        self._device.follow()
        self._device.copy(
            self._ring[at : at + size], flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
        )
        event = self._device.mark()
        self._under_way.append(_UnderWay(end, event))
        if now or flat.is_inference():
            self._device.hold(event)
        else:
            self._lent.append(_Lent(end, flat, flat._version, stream, key))

    def wait_copied(self) -> None:
        self._publish()
        if self._under_way:
            self._device.hold(self._under_way[-1].event)
        while self._lent:
            self._lent.popleft().check()

    def drop(self) -> None:
        self._lent.clear()
        self._writer.wait_copied()

    def finish(self) -> None:
        """(the writer, off the training path) Returns when all that is under way is there. Raises ServiceError if
        the device takes too long."""
        deadline = time.monotonic() + _COPIED_WITHIN_S
        self._publish()
        while self._under_way:
            if time.monotonic() > deadline:
                raise ServiceError(f"the device has not copied a tensor within {_COPIED_WITHIN_S:g} s")
            time.sleep(_POLL_S)
            self._publish()

    def _publish(self) -> None:
        """What has arrived of what is under way. Waits for nothing."""
        end = -1
        while self._under_way and self._under_way[0].event.query():
            end = self._under_way.popleft().end
        if end >= 0:
            self._producer.complete(end)
        while self._lent and self._lent[0].end <= end:
            self._lent.popleft().check()

    def let_go(self) -> None:
        """(the writer is closed) Nobody writes into the ring's memory any more."""
        self._lent.clear()
        with suppress(ServiceError):  # a device that hangs ends with this process
            self.finish()
        self._under_way.clear()
        self._unpin()
        del self._ring


def capture_for(writer: Writer, device: torch.device) -> Capture:
    """How tensors on this device, and those on the CPU, are taken off the training path."""
    lending = writer.lending
    if lending is None:
        return CopyCapture(writer)
    return HostCapture(lending) if device.type == "cpu" else DeviceCapture(lending, Cuda(device))


# Failures at a layer: when a module inside of a stage has computed, and when its gradient has come back to it.


def watch(module: torch.nn.Module, name: str, reached: Callable[[str], None]) -> None:
    """``reached("forward")`` once the submodule of that name has computed its output, ``reached("backward")`` once the
    gradient of that output is known: its own backward comes next. Nothing, if the module has no such submodule: another
    stage of the rank may have it. No bit of what is computed is another one for it."""
    layer = dict(module.named_modules()).get(name)
    if layer is not None:
        layer.register_forward_hook(_Reached(reached))


class _Reached:
    """On a module of the trainer's, who may copy it: a copy is not watched."""

    def __init__(self, reached: Callable[[str], None] | None) -> None:
        self._reached = reached

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._reached is None:
            return
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._backward)  # type: ignore[no-untyped-call]
                break
        self._reached("forward")

    def _backward(self, gradient: torch.Tensor) -> None:
        if self._reached is not None:
            self._reached("backward")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Reached":
        return _Reached(None)

    def __reduce__(self) -> tuple[type["_Reached"], tuple[None]]:
        return _Reached, (None,)


# What shapes the stages of a pipeline send each other, told through the job's store.
#
# torch's stages infer them in the first call of a schedule, and again where it turns from training to evaluation or
# back, all of them in the same call: so evaluation may have batches of another size. A process that takes another
# one's place infers them in a call in which nobody else does. So an inference is known by its *point*, the step and
# call in which it was due: the first stage keeps the list of points, and the shapes that stages tell each other are
# filed under them.
#
#     (all, before they infer in a call)  the newest point at or before it is of this mode: that one holds
#                                         else: the first stage makes this call one, the others wait until it has
#
# Each pipeline has points of its own. While ranks are missing none may be whole: then they infer for all of them, with
# the batches of the ranks that are there (`Shapes.together`). Those points are known to each pipeline ever after.

_TIMEOUT_S = 600.0
_SHAPE_POLL_S = 0.02
POINTS_MAX = 1024
"""Older ones are forgotten: no checkpoint is so old."""


class Point(NamedTuple):
    """Where shapes were inferred. Ordered by step and call."""

    step: int
    call: int
    training: bool


class Shapes:
    """Of one rank; ranks of other pipelines have batches of their own.

    (stage) ``infer`` → ``put``, ``get`` until the next one
    """

    def __init__(self, store: Callable[[], Store], dp_rank: int, check: Callable[[], None]):
        """`store`: of the generation that this rank is in. `check` raises once a newer one is published."""
        self._store = store
        self.dp_rank = dp_rank
        """Whose batch is computed."""
        self._check = check
        self._point = Point(0, 0, training=True)
        self._list = ""
        """Of points, in which this one is."""
        self.together = False
        """All pipelines infer, in the same call, or none does: some of their ranks may be missing. What one of them has
        inferred by itself does not count: who knows it would tell nobody, and who has told it may be gone."""
        self._filed: dict[str, deque[str]] = {}
        self._helps = False
        self.schedule = 0
        """The number of the schedule that runs: each turns from training to evaluation by itself."""

    def for_helper(self) -> "Shapes":
        """Of stages that another rank replays: training only, and begun in some call of the step."""
        other = copy.copy(self)
        other._helps = True
        return other

    def infer(self, step: int, call: int, *, training: bool, first: bool) -> None:
        """A stage is about to. `first`: it is the first one of the pipeline."""
        now = Point(step, call, training)
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._at(now):
            if first and not self._helps:
                self._add(now)
            else:
                self._wait(f"the first stage has inferred no shapes in call {call} of step {step}", deadline)

    def put(self, kind: str, one: int, other: int, value: Any) -> None:
        """Stage `one` tells its neighbour."""
        key, link = self._key(kind, one, other), f"{kind}/{one}-{other}"
        self._store().set(key, json.dumps(value))
        filed = self._filed.setdefault(link, deque())
        if key not in filed:
            filed.append(key)
        if len(filed) > POINTS_MAX:
            self._store().delete_key(filed.popleft())

    def get(self, kind: str, one: int, other: int) -> Any:
        """Waits until stage `one` has put it."""
        key = self._key(kind, one, other)
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._store().check([key]):
            self._wait(f"no neighbour has published the shapes of {key}", deadline)
        return json.loads(self._store().get(key))

    def _at(self, now: Point) -> bool:
        """Takes the point that holds now, if there is one."""
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
        """Polls, so that a notice can end it."""
        self._check()
        if time.monotonic() > deadline:
            raise ServiceError(f"{why} in {_TIMEOUT_S:g} s")
        time.sleep(_SHAPE_POLL_S)


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
    (engine, stages, updates) ``wait_copied`` before memory is used again

    What is sent to other stages is *lent* to the ring (`swift_ft.train.boundary_log`): a native thread copies it while
    the trainer computes, and it is kept alive. That is safe because torch's own asynchronous send has lent it just
    the same, and because everything that may overwrite it waits in `wait_copied`: the next call of the schedule
    (receive buffers, of which an activation may be a view), the optimizer (a stage may send a view of a parameter),
    the end of a step. A trainer that changes a tensor in place meanwhile is found by its version counter. Everything
    else is copied at once, by the trainer's thread: external inputs and targets, which a module or a loader may change
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
        """What is sent inside of one is not logged: its stages replay together, and it is sent again."""
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
        """A notice takes nobody out of a step that computes (`swift_ft.train.lossy`): what the log does not take from
        then on is not missed, because nothing is replayed."""
        self.records_read = 0
        self.microbatches_replayed = 0
        self._watched = False  # or it is known that nobody looks
        self._witness: Witness | None = None
        self.rehearsing = False
        """The step under way is taken back (`swift_ft.train.batch_redistribution`, a warm-up): nothing of it is
        logged."""
        self.rehearsed = False
        """(a rehearsal) What passes inside of a recovery group is read as well, as the rank has recorded it."""
        self.giving_only: Callable[[], AbstractContextManager[None]] = nullcontext
        """(a rehearsal) Around a collective whose result is known otherwise."""
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

    def wait_copied(self) -> None:
        """After this the memory of all that was sent may be used again."""
        self._capture.wait_copied()

    def drop_step(self) -> None:
        """What the step has lent is not looked at any more: whoever does the step again compares it."""
        self._capture.drop()

    def begin_step(self, step: int) -> None:
        self._step = self.randomness.step = step
        self._ordinals = {}
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

    def received(self, stage: int, direction: str, microbatch: int, slot: int, buffer: torch.Tensor) -> None:
        """(a step that is recorded) Of what no other stream has: what another stage of the recovery group sent."""
        if self.witness is not None and self.witness.thorough and not self.replaying:
            self.note(streams.messages(self._rank), self._message_key(direction, microbatch, slot), buffer)

    def _message_key(self, direction: str, microbatch: int, slot: int) -> RecordKey:
        return RecordKey(self._step, 2 * microbatch + (direction == BACKWARD), slot)

    def receive(self, stage: int, direction: str, microbatch: int, slot: int, buffer: torch.Tensor) -> None:
        """(replay) Fills a receive buffer with what `stage` sent. Waits for a record that is still to come."""
        stream = self.stream(stage, direction)
        too = self._step >= self._replayed_too.get(stage, self._step + 1)
        record = self._read(stream, RecordKey(self._step, microbatch, slot), self._share, replayed_too=too)
        fill(buffer, record, f"{stream}@{self._step} microbatch {microbatch}")

    def receive_inside(
        self, stage: int, direction: str, microbatch: int, slot: int, buffer: torch.Tensor
    ) -> None:
        """(rehearsal) As `receive`, of what `received` was told of."""
        record = self.recorded(streams.messages(self._rank), self._message_key(direction, microbatch, slot))
        fill(buffer, record, f"what stage {stage} sent in step {self._step}, microbatch {microbatch}")

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
        return self.groups.crosses(source, destination)

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

    def sends(self, stage: int, direction: str, microbatch: int, slot: int, tensor: torch.Tensor) -> None:
        """As `sent`, also of what stays inside of a recovery group."""
        witness = self.witness
        if witness is not None and witness.thorough:
            place = (slot << 1) + (direction == BACKWARD)
            witness.saw(SENT, stage, microbatch, place, tensor)

    def sent(self, stage: int, direction: str, microbatch: int, slot: int, tensor: torch.Tensor) -> None:
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
            watch(module, name, lambda phase, name=name: self._at_layer(phase, name))  # type: ignore[misc]

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

    def recorded(self, stream: str, key: RecordKey) -> Record:
        """(rehearsal) What the rank has noted there. Waits for it."""
        record: Record = self._read(stream, key)
        return record

    def note(self, stream: str, key: RecordKey, tensor: torch.Tensor) -> None:
        """What a rehearsal reads of this rank's steps."""
        self._check_whole()
        if not (self.rehearsing or self.unsettled):
            self._capture.record(stream, key, tensor, now=True, keep=False)

    def _record(self, stream: str, key: RecordKey, tensor: torch.Tensor, now: bool) -> None:
        """``now``: it may change after the call."""
        self._check_whole()
        if self.rehearsing or self.unsettled:
            return
        if now:
            self.profile.beside(tensor.nbytes)
        if self.groups.logs:
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
        if self._answered:
            self._gives_again(run)
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
        if self._answered:
            self._gives_again(run)
            for key, result in zip(keys, results, strict=True):
                fill(result.detach(), self._result(name, ranks, key), f"collective {name!r}@{self._step}")
        else:
            self._check_before_collective()
            run()
        self.profile.settled()
        for key, result in zip(keys, results, strict=True):
            self._gave(key, result.detach())

    @property
    def _answered(self) -> bool:
        """The log has what collectives gave."""
        return self.replaying and not (self.rehearsed and not self.groups.logs)

    def _gives_again(self, run: Callable[[], Any]) -> None:
        """(rehearsal) What this rank gives to the collective is compared; what it gets is in the log."""
        if self.rehearsed:
            with self.giving_only():
                run()

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
