"""Profile of a rank's steps: seconds per stage, bytes sent.

Always on: its cost is two readings of the clock per microbatch of a stage, which is negligible. On a device these are
events in the training stream, read without a wait once they have passed: the host's clock would measure launches. The
measurements of recent steps go to the coordinator every few seconds (`swift_ft.planner.types`), for `swift-ft plan` and
for the recovery planner. Seconds are wall-clock time without waits for a neighbor or the log.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_low
from types import TracebackType
from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.device import Accelerator, accelerator_in_use
from swift_ft.state.checkpoint_store import Saved

STEPS_KEPT = 16
WARM_STEPS = 2
"""First steps of a process, which allocate memory and infer shapes; they are not counted."""
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


def _moment(device: Accelerator | None) -> Any:
    return time.perf_counter() if device is None else device.moment()


def _seconds(device: Accelerator | None, spans: Iterable[tuple[Any, Any]]) -> float:
    return sum(last - first if device is None else device.seconds(first, last) for first, last in spans)


class _Stopwatch:
    __slots__ = ("_began", "_busy", "_profile", "spans")

    def __init__(self, profile: "StepProfile") -> None:
        self._profile = profile
        self.spans: list[tuple[Any, Any]] = []
        self._began: Any = None
        self._busy = 0.0

    def __enter__(self) -> None:
        self._busy = time.thread_time()
        self._began = _moment(self._profile.device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.mark_last_wait()
        self.spans.append((self._began, self._profile.settled_at))
        self._profile.computed_busy_s += time.thread_time() - self._busy


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ended:
    """A step whose moments have not all passed."""

    step: int
    step_s: float
    busy_s: float
    device: Accelerator | None
    spans: dict[tuple[int, str], list[tuple[Any, Any]]]
    settled: Any
    end: Any
    sent: Counter[tuple[int, int]]
    other_bytes: int

    def has_passed(self) -> bool:
        return self.device is None or self.device.passed(self.end)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    step: int
    step_s: float
    update_s: float
    computed: dict[tuple[int, str], tuple[float, int]]
    """(stage, direction) -> seconds, microbatches"""
    sent: Counter[tuple[int, int]]
    """(stage, destination) -> bytes"""
    other_bytes: int


class StepProfile:
    """Measurements of one rank's steps.

    (engine) ``begin``; (stages, channel) ``computing``, ``settled``, ``sent``, ``beside``, ``read``;
    (engine) ``end``; (lease thread) ``measured``.
    """

    def __init__(self) -> None:
        self._watches: dict[tuple[int, str], _Stopwatch] = {}
        self._sent: Counter[tuple[int, int]] = Counter()
        self._other = 0
        self._read = [0.0, 0.0]
        self._began = 0.0
        self.device: Accelerator | None = None
        """The device whose events are the clock; None: the host's."""
        self.settled_at: Any = 0.0
        self._busy = self.computed_busy_s = 0.0
        self._lock = threading.Lock()
        self._done = 0
        self._ended: deque[_Ended] = deque()
        self._recent: deque[_Step] = deque(maxlen=STEPS_KEPT)
        self._replaying = False
        self._replayed = (0.0, 0.0)  # last replay: bytes read from the log, seconds waiting for them

    def begin(self) -> None:
        for watch in self._watches.values():
            watch.spans = []
        self._sent.clear()
        self._other = 0
        self._read = [0.0, 0.0]
        self._busy, self.computed_busy_s = time.thread_time(), 0.0
        self.device = accelerator_in_use()
        self._began = time.perf_counter()
        self.mark_last_wait()

    def computing(self, stage: int, direction: str) -> _Stopwatch:
        """Returns the context manager that times a stage's computation of one microbatch."""
        watch = self._watches.get((stage, direction))
        if watch is None:
            watch = self._watches[stage, direction] = _Stopwatch(self)
        return watch

    def mark_last_wait(self) -> None:
        """Marks the last wait for another rank: the time from here to the end of the step counts as the update."""
        self.settled_at = _moment(self.device)

    def sent(self, stage: int, destination: int, size: int) -> None:
        """Counts bytes that a stage sends to another one, whether they are logged or not."""
        self._sent[stage, destination] += size

    def beside(self, size: int) -> None:
        """Counts logged bytes that are no stage's message, or that would be logged if there were recovery groups."""
        self._other += size

    def read(self, size: int, waited_s: float) -> None:
        """(replay) Counts bytes read from the log, and the seconds waited for them."""
        self._read[0] += size
        self._read[1] += waited_s

    def end(self, step: int, *, replay: bool) -> None:
        """Completes the step: adds it to the recent ones or, if `replay`, its reads to those of the replay."""
        with self._lock:
            if replay:
                size, waited_s = self._replayed if self._replaying else (0.0, 0.0)
                self._replayed = (size + self._read[0], waited_s + self._read[1])
            else:
                self._done += 1
                if self._done > WARM_STEPS:
                    self._ended.append(self._as_ended(step))
            self._replaying = replay
            while self._ended and self._ended[0].has_passed():
                self._recent.append(_as_done(self._ended.popleft()))

    def _as_ended(self, step: int) -> _Ended:
        return _Ended(
            step=step,
            step_s=time.perf_counter() - self._began,
            busy_s=time.thread_time() - self._busy - self.computed_busy_s,
            device=self.device,
            spans={at: watch.spans for at, watch in self._watches.items() if watch.spans},
            settled=self.settled_at,
            end=_moment(self.device),
            sent=self._sent.copy(),
            other_bytes=self._other,
        )

    def stage_seconds(self) -> dict[int, tuple[float, float]]:
        """Returns stage -> (forward seconds, full backward seconds) per microbatch in recent steps. Empty if there are
        none yet."""
        measured = self.measured({}, None, None)
        stages = () if measured is None else measured.stages
        return {stage.stage: (stage.forward_s, stage.backward_s) for stage in stages}

    def measured(
        self,
        gradient_bytes: Mapping[int, int],
        saved: Saved | None,
        log_write_bytes_per_s: float | None,
        *,
        log_full: bool = False,
    ) -> pb.RankMeasured | None:
        """(any thread) Returns the medians of recent steps, or None if there are none yet.

        The caller supplies `gradient_bytes` of each stage, the newest checkpoint and the log's write rate.
        """
        with self._lock:
            recent, (read_bytes, read_wait_s) = list(self._recent), self._replayed
        if not recent:
            return None
        indices = sorted({stage for done in recent for stage, _ in done.computed})
        stages = [_stage(recent, index, gradient_bytes.get(index, 0)) for index in indices]
        of_checkpoint: dict[str, Any] = {}
        if saved is not None:
            of_checkpoint = {
                "state_bytes": saved.tensor_bytes,
                "checkpoint_bytes": saved.file_bytes,
                "checkpoint_s": saved.seconds,
                "checkpoint_stall_s": saved.stall_s,
            }
        return pb.RankMeasured(
            step=recent[-1].step,
            steps=len(recent),
            microbatches=max((_forwards(recent, index) for index in indices), default=0),
            step_s=median(done.step_s for done in recent),
            update_s=median(done.update_s for done in recent),
            stages=stages,
            other_bytes=median_low(done.other_bytes for done in recent),
            log_write_bytes_per_s=log_write_bytes_per_s,
            log_full=log_full,
            log_read_bytes=int(read_bytes) if read_bytes else None,
            log_read_wait_s=read_wait_s if read_bytes else None,
            **of_checkpoint,
        )


def _as_done(ended: _Ended) -> _Step:
    update_s = _seconds(ended.device, [(ended.settled, ended.end)])
    if ended.device is None:
        # Between its microbatches a step waits for other ranks. CPU time of its own thread there counts as update.
        update_s = max(update_s, ended.busy_s)
    return _Step(
        step=ended.step,
        step_s=ended.step_s,
        update_s=update_s,
        computed={at: (_seconds(ended.device, spans), len(spans)) for at, spans in ended.spans.items()},
        sent=ended.sent,
        other_bytes=ended.other_bytes,
    )


def _stage(recent: list[_Step], stage: int, gradient_bytes: int) -> pb.StageMeasured:
    destinations = sorted({to for done in recent for source, to in done.sent if source == stage})
    sent = [
        pb.Sent(destination=to, bytes=median_low(done.sent[stage, to] for done in recent))
        for to in destinations
    ]
    forward_s, backward_s = (
        median(
            sum(seconds for (index, kind), (seconds, _) in done.computed.items() if (index, kind) in of)
            / max(done.computed.get((stage, FORWARD), (0.0, 0))[1], 1)
            for done in recent
        )
        for of in ([(stage, FORWARD)], [(stage, BACKWARD), (stage, WEIGHTS)])
    )
    return pb.StageMeasured(
        stage=stage, forward_s=forward_s, backward_s=backward_s, sent=sent, gradient_bytes=gradient_bytes
    )


def _forwards(recent: list[_Step], stage: int) -> int:
    return median_low(done.computed.get((stage, FORWARD), (0.0, 0))[1] for done in recent)
