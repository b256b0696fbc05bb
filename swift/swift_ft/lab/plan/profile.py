"""Profile of a job, the planner's input: a JSON document, parsed strictly (docs/planning.md lists its fields).

A number in place of a list stands for every entry. Times are seconds, sizes bytes, both of one optimizer step unless
the field says otherwise. UsageError: one line that names the field and its valid values.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.text import parse_json

FORMAT = 1
STAGES_MAX = 100_000
MACHINES_MAX = 2_000
"""Limited because the planner's tables have a cell for every pair of machines."""
MICROBATCHES_MAX = 1_000_000
STEPS_MAX = 1_000_000_000
BYTES_MAX = 10**13
"""Limit for one boundary and direction, or for one stage's state. Sums over all stages stay below 2**63."""
SECONDS_MIN, SECONDS_MAX = 1e-12, 1e12
RATE_MAX = 1e18
COPIES_MAX = 64
CAPS = ("storage_bytes", "recovery_s", "worst_recovery_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """Limit of a plan: one of `CAPS`."""

    kind: str
    value: float

    def __post_init__(self) -> None:
        if self.kind not in CAPS:
            raise UsageError(f"cap: there is no {_shown(self.kind)}; there are: {', '.join(CAPS)}")
        if self.kind == "storage_bytes":
            _whole(self.value, "cap.storage_bytes", 0, BYTES_MAX * STAGES_MAX)
        else:
            _number(self.value, f"cap.{self.kind}", SECONDS_MIN, SECONDS_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Replay in several copies of the lost group, each with its share of the microbatches."""

    copies_max: int
    gradient_bytes: tuple[int, ...]
    """Per stage: bytes that the copies reduce after every replayed step."""

    def __post_init__(self) -> None:
        _whole(self.copies_max, "parallel.copies_max", 1, COPIES_MAX)
        _all(_whole, self.gradient_bytes, "parallel.gradient_bytes", 0, BYTES_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Checked profile. Raises UsageError if a field is missing, unknown or invalid."""

    name: str
    source: str = ""
    """Origin of the numbers, for readers."""
    microbatches: int
    forward_s: tuple[float, ...]
    """Per stage: time of one microbatch."""
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...] | None = None
    """Per stage: time of a step outside its microbatches, such as the optimizer's; None: negligible."""
    step_s: float | None = None
    """Measured time of a step without failures; None: computed by the schedule's formula."""
    forward_bytes: tuple[int, ...]
    """Per boundary (after each stage but the last): activations of one step."""
    backward_bytes: tuple[int, ...]
    """Per boundary: gradients of one step."""
    other_bytes: int = 0
    """Bytes logged in every step for any groups: external inputs, targets, results of collectives."""
    machine_of_stage: tuple[int, ...]
    log_write_bytes_per_s: float
    """Rate at which one machine's ranks write into the log."""
    log_read_bytes_per_s: float
    """Rate at which one recovery group reads from the log."""
    log_copy_bytes_per_s: float | None = None
    """Rate of the copies for the log, for which a machine's trainers wait; None: they do not wait."""
    network_bytes_per_s: float | None = None
    """Rate between two ranks; None: transfers take no relevant time."""
    checkpoint_interval_steps: int
    checkpoint_bytes: tuple[int, ...]
    """Per stage: parameters and optimizer state."""
    checkpoint_bytes_per_s: float
    """Rate of one machine, both for saving and for loading."""
    checkpoint_stall_s: float | None = None
    """Time for which a checkpoint stalls training; None: until it is written."""
    machine_mtbf_s: tuple[float, ...]
    """Per machine: mean time between its failures."""
    fixed_s: float = 0.0
    """Fixed time of every recovery, besides loading and replay: detect, fence, plan, rebuild."""
    parallel: Parallel | None = None
    """None: one copy."""
    cap: Cap | None = None

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        _whole(stages, "stages", 1, STAGES_MAX)
        for text, where in ((self.name, "name"), (self.source, "source")):
            if not isinstance(text, str) or not text.isprintable():
                raise UsageError(f"{where}: must be one line of text, not {_shown(text)}")
        _whole(self.microbatches, "microbatches", 1, MICROBATCHES_MAX)
        _whole(self.checkpoint_interval_steps, "checkpoint.interval_steps", 1, STEPS_MAX)
        _whole(self.other_bytes, "other_bytes", 0, BYTES_MAX)
        self._check_stages(stages)
        self._check_machines(stages)
        for value, where in (
            (self.log_write_bytes_per_s, "log.write_bytes_per_s"),
            (self.log_read_bytes_per_s, "log.read_bytes_per_s"),
            (self.log_copy_bytes_per_s, "log.copy_bytes_per_s"),
            (self.network_bytes_per_s, "network_bytes_per_s"),
            (self.checkpoint_bytes_per_s, "checkpoint.bytes_per_s"),
        ):
            if value is not None:
                _number(value, where, 1.0, RATE_MAX)
        if self.step_s is not None:
            _number(self.step_s, "step_s", SECONDS_MIN, SECONDS_MAX)
        for value, where in ((self.checkpoint_stall_s, "checkpoint.stall_s"), (self.fixed_s, "fixed_s")):
            if value is not None:
                _number(value, where, 0.0, SECONDS_MAX)
        if self.parallel is not None:
            _length(self.parallel.gradient_bytes, "parallel.gradient_bytes", stages, "stage")
            if self.parallel.copies_max > 1 and self.network_bytes_per_s is None:
                raise UsageError("network_bytes_per_s: is missing, and parallel.copies_max above 1 needs it")

    def _check_stages(self, stages: int) -> None:
        update_s = self.update_s if self.update_s is not None else (0.0,) * stages
        for times, where in (
            (self.forward_s, "forward_s"),
            (self.backward_s, "backward_s"),
            (update_s, "update_s"),
        ):
            _length(times, where, stages, "stage")
            _all(_number, times, where, 0.0, SECONDS_MAX)
        for stage, (forward, backward) in enumerate(zip(self.forward_s, self.backward_s, strict=True)):
            if forward + backward < SECONDS_MIN:
                raise UsageError(f"forward_s and backward_s: stage {stage} computes nothing; give its times")
        _length(self.checkpoint_bytes, "checkpoint.bytes", stages, "stage")
        _all(_whole, self.checkpoint_bytes, "checkpoint.bytes", 0, BYTES_MAX)
        for sizes, where in ((self.forward_bytes, "forward_bytes"), (self.backward_bytes, "backward_bytes")):
            _length(sizes, where, stages - 1, "boundary")
            _all(_whole, sizes, where, 0, BYTES_MAX)
        for boundary, sizes in enumerate(zip(self.forward_bytes, self.backward_bytes, strict=True)):
            if sum(sizes) == 0:
                raise UsageError(
                    f"forward_bytes and backward_bytes: nothing crosses boundary {boundary}; give what does"
                )

    def _check_machines(self, stages: int) -> None:
        _length(self.machine_of_stage, "machines.of_stage", stages, "stage")
        last = -1
        for stage, machine in enumerate(self.machine_of_stage):
            _whole(machine, f"machines.of_stage[{stage}]", 0, MACHINES_MAX - 1)
            if not last <= machine <= last + 1:
                raise UsageError(
                    f"machines.of_stage: stage {stage} is on machine {machine} after machine {max(last, 0)}; number "
                    "machines from 0 in the order of their stages, each with neighbouring stages only"
                )
            last = machine
        _length(self.machine_mtbf_s, "failures.machine_mtbf_s", last + 1, "machine")
        _all(_number, self.machine_mtbf_s, "failures.machine_mtbf_s", SECONDS_MIN, SECONDS_MAX)

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def machines(self) -> int:
        return len(self.machine_mtbf_s)

    def document(self) -> dict[str, Any]:
        """Returns the JSON document that `parse` reads; for programs that measure a job."""
        fields: dict[str, Any] = {"profile": FORMAT, "name": self.name, "source": self.source}
        fields["stages"] = self.stages
        for name in ("microbatches", "step_s", "other_bytes", "network_bytes_per_s", "fixed_s"):
            fields[name] = getattr(self, name)
        for name in ("forward_s", "backward_s", "forward_bytes", "backward_bytes"):
            fields[name] = list(getattr(self, name))
        fields["update_s"] = None if self.update_s is None else list(self.update_s)
        fields["machines"] = {"of_stage": list(self.machine_of_stage)}
        fields["log"] = {
            "write_bytes_per_s": self.log_write_bytes_per_s,
            "read_bytes_per_s": self.log_read_bytes_per_s,
            "copy_bytes_per_s": self.log_copy_bytes_per_s,
        }
        fields["checkpoint"] = {
            "interval_steps": self.checkpoint_interval_steps,
            "bytes": list(self.checkpoint_bytes),
            "bytes_per_s": self.checkpoint_bytes_per_s,
            "stall_s": self.checkpoint_stall_s,
        }
        fields["failures"] = {"machine_mtbf_s": list(self.machine_mtbf_s)}
        if self.parallel is not None:
            fields["parallel"] = {
                "copies_max": self.parallel.copies_max,
                "gradient_bytes": list(self.parallel.gradient_bytes),
            }
        if self.cap is not None:
            fields["cap"] = {self.cap.kind: self.cap.value}
        return {name: value for name, value in fields.items() if value is not None}


def parse(text: str | bytes) -> Profile:
    """Parses a document. Raises UsageError, in one line, if it is invalid."""
    fields = _Fields(parse_json(text), "")
    version = fields.pop("profile")
    if version != FORMAT or isinstance(version, bool):
        raise UsageError(f"profile: must be {FORMAT}, the version of the format, not {_shown(version)}")
    stages = _whole(fields.pop("stages"), "stages", 1, STAGES_MAX)
    values = {**_head(fields, stages), **_services(fields, stages)}
    of_stage = _machines(fields.part("machines"), stages)
    machines = max((m for m in of_stage if isinstance(m, int)), default=0) + 1
    failures = fields.part("failures")
    mtbf = failures.spread("machine_mtbf_s", min(max(machines, 1), MACHINES_MAX))
    failures.end()
    parallel = fields.part("parallel", needed=False)
    if parallel is not None:
        values["parallel"] = Parallel(
            copies_max=parallel.pop("copies_max"),
            gradient_bytes=parallel.spread("gradient_bytes", stages, "stage"),
        )
        parallel.end()
    cap = fields.part("cap", needed=False)
    if cap is not None:
        values["cap"] = cap.only()
    fields.end()
    return Profile(machine_of_stage=of_stage, machine_mtbf_s=mtbf, **values)


def _head(fields: "_Fields", stages: int) -> dict[str, Any]:
    return {
        "name": fields.pop("name"),
        "source": fields.pop("source", ""),
        "microbatches": fields.pop("microbatches"),
        "forward_s": fields.spread("forward_s", stages, "stage"),
        "backward_s": fields.spread("backward_s", stages, "stage"),
        "update_s": fields.spread("update_s", stages, "stage") if fields.has("update_s") else None,
        "step_s": fields.pop("step_s", None),
        "forward_bytes": fields.spread("forward_bytes", stages - 1, "boundary"),
        "backward_bytes": fields.spread("backward_bytes", stages - 1, "boundary"),
        "other_bytes": fields.pop("other_bytes", 0),
        "network_bytes_per_s": fields.pop("network_bytes_per_s", None),
        "fixed_s": fields.pop("fixed_s", 0.0),
    }


def _services(fields: "_Fields", stages: int) -> dict[str, Any]:
    log, checkpoint = fields.part("log"), fields.part("checkpoint")
    values = {
        "log_write_bytes_per_s": log.pop("write_bytes_per_s"),
        "log_read_bytes_per_s": log.pop("read_bytes_per_s"),
        "log_copy_bytes_per_s": log.pop("copy_bytes_per_s", None),
        "checkpoint_interval_steps": checkpoint.pop("interval_steps"),
        "checkpoint_bytes": checkpoint.spread("bytes", stages, "stage"),
        "checkpoint_bytes_per_s": checkpoint.pop("bytes_per_s"),
        "checkpoint_stall_s": checkpoint.pop("stall_s", None),
    }
    log.end()
    checkpoint.end()
    return values


def _machines(fields: "_Fields", stages: int) -> tuple[Any, ...]:
    """Returns the machine of every stage: as listed, or a fixed number of stages per machine."""
    if fields.has("of_stage"):
        of_stage = fields.pop("of_stage")
        fields.end()
        if not isinstance(of_stage, list):
            raise UsageError(f"machines.of_stage: must be a list of machines, not {_shown(of_stage)}")
        return tuple(of_stage)
    count = _whole(fields.pop("count"), "machines.count", 1, MACHINES_MAX)
    ranks = _whole(fields.pop("ranks_per_machine"), "machines.ranks_per_machine", 1, STAGES_MAX)
    fields.end()
    if count * ranks != stages:
        raise UsageError(
            f"machines: {count} machines of {ranks} ranks are not {stages} stages; "
            "give machines.of_stage, the machine of every stage"
        )
    return tuple(stage // ranks for stage in range(stages))


_MISSING = object()


class _Fields:
    """JSON object whose fields are each read once; the rest are unknown."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise UsageError(f"{where or 'a profile'}: must be an object, not {_shown(value)}")
        self._values = dict(value)
        self._where = f"{where}." if where else ""

    def has(self, name: str) -> bool:
        return name in self._values

    def pop(self, name: str, default: Any = _MISSING) -> Any:
        value = self._values.pop(name, default)
        if value is _MISSING:
            raise UsageError(f"{self._where}{name}: is missing")
        if value is None and default is not None:
            raise UsageError(f"{self._where}{name}: must not be null")
        return value

    def spread(self, name: str, count: int, of: str = "") -> tuple[Any, ...]:
        """Reads a list with an entry for every `of` (unchecked if `of` is empty), or one number for all its entries."""
        value = self.pop(name)
        if isinstance(value, list):
            if of:
                _length(value, f"{self._where}{name}", count, of)
            return tuple(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(
                f"{self._where}{name}: must be a number or a list of numbers, not {_shown(value)}"
            )
        return (value,) * count

    def part(self, name: str, *, needed: bool = True) -> Any:
        if not needed and name not in self._values:
            return None
        return _Fields(self.pop(name), f"{self._where}{name}")

    def only(self) -> Cap:
        if len(self._values) != 1:
            raise UsageError(f"cap: give one of {', '.join(CAPS)}")
        ((kind, value),) = self._values.items()
        return Cap(kind=kind, value=value)

    def end(self) -> None:
        for name in self._values:
            raise UsageError(f"{self._where}{_shown(name)[1:-1]}: there is no such field")


def _shown(value: Any) -> str:
    """Formats a value of the document for a message: on one line, shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]}..."


def _number(value: Any, where: str, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where}: must be a number, not {_shown(value)}")
    if not least <= value <= most:  # also rejects NaN
        raise UsageError(f"{where}: must be from {least:g} to {most:g}, not {_shown(value)}")


def _whole(value: Any, where: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{where}: must be a whole number, not {_shown(value)}")
    if not least <= value <= most:
        raise UsageError(f"{where}: must be from {least} to {most}, not {_shown(value)}")
    return value


def _all(check: Any, values: Sequence[Any], where: str, least: float, most: float) -> None:
    for index, value in enumerate(values):
        check(value, f"{where}[{index}]", least, most)


def _length(values: Sequence[Any], where: str, count: int, of: str) -> None:
    if len(values) != count:
        plural = {"boundary": "boundaries"}.get(of, f"{of}s")
        raise UsageError(
            f"{where}: must have an entry for every {of}: {count} {plural if count != 1 else of}, not {len(values)}"
        )
