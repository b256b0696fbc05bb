"""Grammar of injected failures, and the list of those that ranks inject themselves: ``SWIFT_FAULTS``, in JSON.

`swift_ft.train.fault_points` reads the list. At a failure's coordinates it creates ``$SWIFT_FAULTS_DIR/<id>.fired``
exclusively, emits the event "fault" and does what the item's ``kind`` says. With "hold" it first creates
``<id>.reached`` and waits for ``<id>.go``: so the launcher can flip a bit, slow a rank down or kill a service at that
very place of the step, and let several victims of one step die at once.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from swift_ft.errors import UsageError

# Text form of one failure, used by ``swift-ft drill --kill`` and ``swift-ft run --failures``; docs/drills.md lists all.
#
# Instead of ``step`` a failure may have ``at``, in seconds since the first rank was started. The drill and the run each
# check which failures they can inject. Parsing knows all words and raises `UsageError`, in one line that names the
# allowed values. A failure round-trips through ``str``.

KINDS = ("kill", "stop", "hang", "device", "slow")
FOR_GOOD = ("kill", "device")
"""Kinds that end the process."""
PHASES = (
    "forward",
    "backward",
    "weights",
    "reduce",
    "update",
    "optimizer",
    "idle",
    "save",
    "replay",
    "copy",
    "finish",
    "snapshot",
)
"""`weights`: after gradients of weights that are computed separately from those of inputs. `reduce`: in the middle of
the reduction of a step's gradients. `update`: some buckets of a wait-free step are applied while others are still being
reduced. `optimizer`: some are applied, all are reduced. `save`: half of the checkpoint after the step is written.
`finish`: in a step that is finished after another loss: finished averages are reused, the others not averaged yet.
`snapshot`: half of this rank's snapshot was sent to the rank that keeps it; `step` is the version of the snapshot."""
MICROBATCH_PHASES = ("forward", "backward", "weights", "replay")
LAYER_PHASES = ("forward", "backward")
BUCKET_PHASES = ("reduce", "update", "optimizer")
RECOVERY_PHASES = ("replay", "copy", "finish")
"""Phases of a recovery: another rank must fail first."""
STATES = ("running", "fencing", "planning", "recovering")
SECONDS_MAX = 1e6
SPEC_MAX = 5000
"""Maximum characters of one failure; a path has at most 4096."""
FACTOR_MAX = 1000.0

_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?\Z")
_STREAM = re.compile(r"s[0-9]{1,4}(c[0-9]{1,4})?\.[FB]\Z")
_LAYER = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z")


def seconds_text(seconds: float) -> str:
    """Returns the seconds as parsing accepts them: at most six decimals."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".")


def _when(step: int | None, at_s: float | None) -> str:
    return f"step={step}" if at_s is None else f"at={seconds_text(at_s)}"


def _lasts(for_s: float | None) -> str:
    return "" if for_s is None else f",for={seconds_text(for_s)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFault:
    """Failure of a rank at (step, microbatch, phase), or at a time. `kind` is one of `KINDS`."""

    rank: int
    phase: str = "backward"
    step: int | None = None
    """None: at the first replay, or the first copy; or at the time `at_s`."""
    microbatch: int = 0
    kind: str = "kill"
    layer: str = ""
    """Module of the stage after whose computation it happens, in the phases forward and backward; empty: the whole
    stage."""
    bucket: int | None = None
    """Bucket of gradients, in the phases reduce, update and optimizer; None: half-way."""
    for_s: float | None = None
    """Duration in seconds; None: for good."""
    factor: float = 1.0
    """(slow) Divisor of the rank's share of CPU time."""
    at_s: float | None = None
    """Seconds since the first rank was started; then there are no other coordinates."""

    def __str__(self) -> str:
        parts = [] if self.kind == "kill" else [f"kind={self.kind}"]
        parts.append(f"rank={self.rank}")
        if self.at_s is not None or self.step is not None:
            parts.append(_when(self.step, self.at_s))
        numbered = self.phase in MICROBATCH_PHASES and self.at_s is None
        if numbered and (self.microbatch or self.phase != "replay"):
            parts.append(f"microbatch={self.microbatch}")
        if self.at_s is None:
            parts.append(f"phase={self.phase}")
        if self.layer:
            parts.append(f"layer={self.layer}")
        if self.bucket is not None:
            parts.append(f"bucket={self.bucket}")
        if self.kind == "slow":
            parts.append(f"factor={seconds_text(self.factor)}")
        return ",".join(parts) + _lasts(self.for_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogServerFault:
    """SIGKILL of the log server once some rank has begun this step; it is started again on the same port."""

    step: int | None = None
    at_s: float | None = None
    for_s: float | None = None
    """Seconds until it is started again; None: at once."""

    def __str__(self) -> str:
        return f"service=logserver,{_when(self.step, self.at_s)}{_lasts(self.for_s)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLossFault:
    """SIGKILL of a log server that is not started again: at a step, together with the ranks killed in it; without a
    step, when the first replay begins."""

    server: int
    step: int | None = None
    at_s: float | None = None

    def __str__(self) -> str:
        first_replay = self.step is None and self.at_s is None
        return f"log={self.server}," + ("phase=replay" if first_replay else _when(self.step, self.at_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorFault:
    """SIGKILL of the coordinator when it has made this state durable, or when a rank has begun this step. It is started
    again."""

    state: str = ""
    step: int | None = None
    at_s: float | None = None
    for_s: float | None = None
    """Seconds until it is started again; None: at once."""

    def __str__(self) -> str:
        when = f"state={self.state}" if self.state else _when(self.step, self.at_s)
        return f"service=coordinator,{when}{_lasts(self.for_s)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptFault:
    """One bit flipped in a stream that the replay of the rank killed at this step will read."""

    step: int
    stream: str = ""
    """Empty: the first stream that the victim's replay reads."""

    def __str__(self) -> str:
        return f"corrupt=log,step={self.step}" + (f",stream={self.stream}" if self.stream else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptCopyFault:
    """One bit flipped in the first state that this rank receives from a replica, as it arrives."""

    rank: int

    def __str__(self) -> str:
        return f"corrupt=copy,rank={self.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptCheckpointFault:
    """One bit flipped in this rank's newest checkpoint, before the rank killed at this step dies."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"corrupt=checkpoint,rank={self.rank},step={self.step}"


Fault = (
    RankFault
    | LogServerFault
    | LogLossFault
    | CoordinatorFault
    | CorruptFault
    | CorruptCheckpointFault
    | CorruptCopyFault
)


class Fields:
    """Parsed ``key=value,key=value``: each value is read by its key, and checked. All methods raise UsageError, which
    names the flag and the given text."""

    def __init__(self, spec: str, flag: str) -> None:
        if len(spec) > SPEC_MAX:
            raise UsageError(f"{flag} {spec[:40]!r}...: a failure has at most {SPEC_MAX} characters")
        self.spec = spec
        self._said = f"{flag} {spec!r}" if len(spec) <= 300 else f"{flag} {spec[:300]!r}..."
        self._fields: dict[str, str] = {}
        for part in spec.split(","):
            key, equals, value = part.strip().partition("=")
            key, value = key.strip().lower(), value.strip()
            if not equals or not key or not value:
                raise self.error(f"{part[:40]!r} is not key=value (such as rank=2,step=17)")
            if key in self._fields:
                raise self.error(f"{key} is given twice")
            self._fields[key] = value

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def error(self, what: str) -> UsageError:
        return UsageError(f"{self._said}: {what}")

    def only(self, *allowed: str) -> None:
        for key in self._fields:
            if key not in allowed:
                raise self.error(f"unknown key {key!r}: allowed here are {', '.join(allowed)}")

    def word(self, key: str, default: str = "") -> str:
        return self._fields.get(key, default).lower()

    def text(self, key: str, pattern: "re.Pattern[str]", what: str) -> str:
        """Returns the value; empty if it was not given. `what` describes the pattern."""
        value = self._fields.get(key, "")
        if value and not pattern.match(value):
            raise self.error(f"{key} must be {what}, not {value!r}")
        return value

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.word(key, default)
        if value not in allowed:
            raise self.error(f"unknown {key} {value!r}: one of {', '.join(allowed)}")
        return value

    def number(self, key: str) -> int:
        value = self._fields.get(key)
        if value is None:
            raise self.error(f"{key} is missing")
        if not _NUMBER.match(value):
            raise self.error(f"{key} must be a number, not {value!r}")
        return int(value)

    def number_or_none(self, key: str) -> int | None:
        return self.number(key) if key in self._fields else None

    def decimal(self, key: str, least: float, most: float) -> float | None:
        """Returns the number; None if it was not given."""
        value = self._fields.get(key)
        if value is None:
            return None
        if not _DECIMAL.match(value) or not least <= float(value) <= most:
            raise self.error(
                f"{key} must be a number from {least:g} to {most:.10g}, in digits, not {value!r}"
            )
        return float(value)

    def seconds(self, key: str) -> float | None:
        return self.decimal(key, 0.0, SECONDS_MAX)

    def when(self) -> tuple[int | None, float | None]:
        """Returns (step, time in seconds), one of which is None."""
        if ("step" in self) == ("at" in self):
            wrong = "step and at are both given" if "step" in self else "step is missing"
            raise self.error(f"{wrong}: give step=N, or at=SECONDS since the start")
        return self.number_or_none("step"), self.seconds("at")


def parse(spec: str, flag: str = "--kill") -> Fault:
    """Parses one failure. Raises `UsageError`, which names `flag`."""
    fields = Fields(spec, flag)
    if "corrupt" in fields:
        return _corrupt_fault(fields)
    if "rank" in fields:
        return _rank_fault(fields)
    if "log" in fields:
        return _log_loss(fields)
    if "service" in fields:
        return _service_fault(fields)
    raise fields.error(
        "it names no victim: rank=N, log=N, service=logserver, service=coordinator, corrupt=log, "
        "corrupt=checkpoint or corrupt=copy"
    )


def _rank_fault(fields: Fields) -> RankFault:
    fields.only("kind", "rank", "step", "at", "microbatch", "phase", "layer", "bucket", "for", "factor")
    kind = fields.one_of("kind", KINDS, "kill")
    for_s, factor = lasting(fields, kind)
    if "at" in fields:
        for key in ("microbatch", "phase", "layer", "bucket"):
            if key in fields:
                raise fields.error(f"{key} needs a step: at is any place in a step")
        _, at_s = fields.when()
        rank = fields.number("rank")
        return RankFault(rank=rank, at_s=at_s, kind=kind, for_s=for_s, factor=factor)
    phase = fields.one_of("phase", PHASES, "backward")
    if "step" not in fields and phase not in RECOVERY_PHASES:
        raise fields.error("step is missing (only phase=replay and phase=copy need none)")
    if "step" in fields and phase == "copy":
        raise fields.error("phase=copy takes no step: it is the first copy that the rank is in")
    layer = fields.text("layer", _LAYER, "a module's name in its stage (such as blocks.1)")
    if layer and phase not in LAYER_PHASES:
        raise fields.error("layer needs phase=forward or phase=backward")
    if "bucket" in fields and phase not in BUCKET_PHASES:
        raise fields.error("bucket needs phase=reduce, phase=update or phase=optimizer")
    if kind != "kill" and phase in RECOVERY_PHASES:
        raise fields.error(f"kind={kind} needs a phase that is not of a recovery")
    microbatch = fields.number("microbatch") if "microbatch" in fields else 0
    return RankFault(
        rank=fields.number("rank"),
        step=fields.number_or_none("step"),
        # The other phases happen once per step: a microbatch given there is ignored.
        microbatch=microbatch if phase in MICROBATCH_PHASES else 0,
        phase=phase,
        kind=kind,
        layer=layer,
        bucket=fields.number_or_none("bucket"),
        for_s=for_s,
        factor=factor,
    )


def lasting(fields: Fields, kind: str, *, mixed: bool = False) -> tuple[float | None, float]:
    """Returns (duration in seconds, slow-down factor). `mixed`: the values may be for failures of other kinds. Raises
    UsageError."""
    for_s, factor = fields.seconds("for"), fields.decimal("factor", 1.0, FACTOR_MAX)
    if not mixed:
        if kind in FOR_GOOD and for_s is not None:
            raise fields.error(f"a {kind} is for good: leave for= out")
        if kind == "slow" and for_s is None:
            raise fields.error("kind=slow needs for=SECONDS")
        if (kind == "slow") != (factor is not None):
            raise fields.error("kind=slow needs factor=F" if kind == "slow" else "factor needs kind=slow")
    return for_s, 1.0 if factor is None else factor


def _log_loss(fields: Fields) -> LogLossFault:
    fields.only("log", "step", "at", "phase")
    phase = fields.word("phase")
    if ("step" in fields) + ("at" in fields) + bool(phase) != 1 or phase not in ("", "replay"):
        raise fields.error("give a step, or phase=replay")
    server = fields.number("log")
    if phase:
        return LogLossFault(server=server)
    step, at_s = fields.when()
    return LogLossFault(server=server, step=step, at_s=at_s)


def _service_fault(fields: Fields) -> Fault:
    service = fields.word("service")
    if service == "logserver":
        fields.only("service", "step", "at", "for")
        step, at_s = fields.when()
        return LogServerFault(step=step, at_s=at_s, for_s=fields.seconds("for"))
    if service == "coordinator":
        fields.only("service", "state", "step", "at", "for")
        if "step" in fields or "at" in fields:
            if "state" in fields:
                raise fields.error("give a state or a step, not both")
            step, at_s = fields.when()
            return CoordinatorFault(step=step, at_s=at_s, for_s=fields.seconds("for"))
        state = fields.word("state")
        if "for" in fields:
            raise fields.error(
                "for needs a step, or at: whoever gives a state starts the coordinator again at once"
            )
        if state not in STATES:
            raise fields.error(f"state must be one of {', '.join(STATES)}")
        return CoordinatorFault(state=state)
    raise fields.error(f"unknown service {service!r}: logserver or coordinator")


def _corrupt_fault(fields: Fields) -> CorruptFault | CorruptCheckpointFault | CorruptCopyFault:
    what = fields.word("corrupt")
    if what == "checkpoint":
        fields.only("corrupt", "rank", "step")
        return CorruptCheckpointFault(rank=fields.number("rank"), step=fields.number("step"))
    if what == "copy":
        fields.only("corrupt", "rank")
        return CorruptCopyFault(rank=fields.number("rank"))
    if what != "log":
        raise fields.error("corrupt must be log, checkpoint or copy")
    fields.only("corrupt", "step", "stream")
    stream = fields.word("stream")
    stream = stream[:-1] + stream[-1:].upper()
    if stream and not _STREAM.match(stream):
        raise fields.error("a stream is s<stage>.F or s<stage>.B (such as s1.F; s1c0.F with replicas)")
    return CorruptFault(step=fields.number("step"), stream=stream)


def fault_id(index: int) -> str:
    return f"fault{index}"


ENV_FAULTS = "SWIFT_FAULTS"
ENV_FAULTS_DIR = "SWIFT_FAULTS_DIR"
IN_THE_RANK = ("kill", "stop", "hang", "device")
"""Kinds that a rank inflicts on itself. For all others it only reports that it has reached the place, and waits."""


BEFORE_A_LOSS = CorruptFault | CorruptCheckpointFault | LogLossFault
"""Failures of a log or a checkpoint that are injected before the victims of that step die."""


def item(
    fault: RankFault | CorruptCopyFault, name: str, *, hold: bool = False, beside: Collection[int] = ()
) -> dict[str, Any]:
    """Returns one entry of the list. `name`: its id. `beside`: ranks that it waits for, until they have come as far."""
    if isinstance(fault, CorruptCopyFault):
        return {"id": name, "rank": fault.rank, "phase": "flip"}
    told: dict[str, Any] = {
        "id": name,
        "rank": fault.rank,
        "step": fault.step,
        "microbatch": fault.microbatch,
        "phase": fault.phase,
    }
    if fault.kind != "kill":
        told["kind"] = fault.kind if fault.kind in IN_THE_RANK else "pause"
    if fault.kind == "hang" and fault.for_s is not None:
        told["for_s"] = fault.for_s
    if fault.layer:
        told["layer"] = fault.layer
    if fault.bucket is not None:
        told["bucket"] = fault.bucket
    if hold or fault.kind not in IN_THE_RANK:
        told["hold"] = True
    if beside:
        told["beside"] = sorted(beside)
    return told


def pause(name: str, rank: int, step: int) -> dict[str, Any]:
    """Returns an entry for a rank that waits before this step for ``<name>.go``."""
    return {"id": name, "rank": rank, "step": step, "phase": "idle", "kind": "pause", "hold": True}


def held_together(faults: Sequence[Fault]) -> list[list[int]]:
    """Returns groups of indices of rank faults that are held and released together: the victims of one step, if there
    are several, or if a log is corrupted or a log server lost before."""
    by_step: dict[int, list[int]] = {}
    for index, fault in enumerate(faults):
        if not isinstance(fault, RankFault) or fault.kind != "kill" or fault.phase in RECOVERY_PHASES:
            continue
        if fault.step is not None:
            by_step.setdefault(fault.step, []).append(index)
    beside = {fault.step for fault in faults if isinstance(fault, BEFORE_A_LOSS)}
    return [group for step, group in by_step.items() if len(group) > 1 or step in beside]
