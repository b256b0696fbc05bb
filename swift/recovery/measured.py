"""What a rank has measured of its own steps, while the job runs. All frozen, and valid once it exists.

(rank) `swift.runtime.profiling`, every few seconds → (coordinator) kept in memory, the newest of each rank → `plan()`,
and `swift-ft plan --coordinator`. After a restart of the coordinator it comes again; what a rank that is dead has said
before stays.
"""

import math
from dataclasses import dataclass

STAGES_MAX = 64
"""That one rank runs."""
DESTINATIONS_MAX = 16
"""Stages that one stage sends to."""
STAGE_INDEX_MAX = 1 << 20
COUNT_MAX = 1 << 62
SECONDS_MAX = 1e9
RATE_MAX = 1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What a stage gives to another one in a step, whether it is logged or not."""

    destination: int
    """The other stage."""
    bytes: int

    def __post_init__(self) -> None:
        _whole("destination", self.destination, STAGE_INDEX_MAX)
        _whole("bytes", self.bytes, COUNT_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMeasured:
    """One stage. Seconds are medians over recent steps, replayed ones left out, without any wait for others."""

    stage: int
    forward_s: float
    """One microbatch."""
    backward_s: float
    """One microbatch; gradients of weights that are computed apart are in it."""
    sent: tuple[Sent, ...] = ()
    gradient_bytes: int = 0
    """Of the parameters that are trained."""

    def __post_init__(self) -> None:
        _whole("stage", self.stage, STAGE_INDEX_MAX)
        _number("forward_s", self.forward_s, SECONDS_MAX)
        _number("backward_s", self.backward_s, SECONDS_MAX)
        _whole("gradient_bytes", self.gradient_bytes, COUNT_MAX)
        if len(self.sent) > DESTINATIONS_MAX:
            raise ValueError(
                f"stage {self.stage} sends to {len(self.sent)} stages: at most {DESTINATIONS_MAX}"
            )
        if len({sent.destination for sent in self.sent}) < len(self.sent):
            raise ValueError(f"stage {self.stage} names a destination twice")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasured:
    """One rank. None: not measured yet."""

    step: int
    """The last one that is in it."""
    steps: int
    """So many are in it."""
    microbatches: int
    """Of one step."""
    step_s: float
    """A whole step, waits for others included."""
    update_s: float
    """What a step takes behind its last microbatch and its last wait, as for the optimizer; what it does besides
    its microbatches in all, if that is more."""
    stages: tuple[StageMeasured, ...]
    """By their index."""
    other_bytes: int = 0
    """External inputs, targets and results of collectives, of one step: logged as soon as there are two groups."""
    state_bytes: int | None = None
    """Of the tensors in a checkpoint: parameters, optimizer, buffers."""
    checkpoint_bytes: int | None = None
    """Of its files."""
    checkpoint_s: float | None = None
    """From the end of its step until it was durable."""
    checkpoint_stall_s: float | None = None
    """For which it held the trainer up."""
    log_write_bytes_per_s: float | None = None
    """Raw bytes that the log took while there was something to take."""
    log_full: bool = False
    """Training has waited for the log lately, or records were dropped: it takes no more than that."""
    log_read_bytes: int | None = None
    """That the last replay on this rank got out of the log."""
    log_read_wait_s: float | None = None
    """For which it waited for these."""

    def __post_init__(self) -> None:
        for name in (
            "step",
            "microbatches",
            "other_bytes",
            "state_bytes",
            "checkpoint_bytes",
            "log_read_bytes",
        ):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, COUNT_MAX)
        if self.steps < 1:
            raise ValueError("steps is 0: nothing was measured")
        _whole("steps", self.steps, COUNT_MAX)
        for name in ("step_s", "update_s", "checkpoint_s", "checkpoint_stall_s", "log_read_wait_s"):
            value = getattr(self, name)
            if value is not None:
                _number(name, value, SECONDS_MAX)
        if self.log_write_bytes_per_s is not None:
            _number("log_write_bytes_per_s", self.log_write_bytes_per_s, RATE_MAX)
        if len(self.stages) > STAGES_MAX:
            raise ValueError(f"{len(self.stages)} stages: a rank runs at most {STAGES_MAX}")
        indices = [stage.stage for stage in self.stages]
        if indices != sorted(set(indices)):
            raise ValueError(f"stages must ascend: {indices}")


def _whole(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value}: must be from 0 to {most}")


def _number(name: str, value: float, most: float) -> None:
    if not math.isfinite(value) or not 0 <= value <= most:
        raise ValueError(f"{name} is {value}: must be from 0 to {most:g}")
