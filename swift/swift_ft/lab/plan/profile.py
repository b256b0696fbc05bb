"""Profile of a job, the planner's input: a JSON document, parsed strictly (docs/planning.md lists its fields).

A number in place of a list stands for every entry. Times are seconds, sizes bytes, both of one optimizer step unless
the field says otherwise. UsageError: one line that names the field and its valid values.
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from swift_ft.errors import UsageError
from swift_ft.files import read_given
from swift_ft.text import parse_json

FORMAT = 1
STAGES_MAX = 100_000
MACHINES_MAX = 2_000
"""Limited because the planner's tables have a cell for every pair of machines."""
BYTES_MAX = 10**13
"""Limit for one boundary and direction, or for one stage's state. Sums over all stages stay below 2**63."""
SECONDS_MIN, SECONDS_MAX = 1e-12, 1e12
RATE_MAX = 1e18
COPIES_MAX = 64


class _Rule(NamedTuple):
    """Place of a value in the document, and its bounds."""

    path: str
    least: float
    most: float
    of: str = ""
    """What the value is a list of, with an entry for each; empty: a single number."""
    whole: bool = False


_CAPS = {
    "storage_bytes": _Rule("cap.storage_bytes", 0, BYTES_MAX * STAGES_MAX, whole=True),
    "recovery_s": _Rule("cap.recovery_s", SECONDS_MIN, SECONDS_MAX),
    "worst_recovery_s": _Rule("cap.worst_recovery_s", SECONDS_MIN, SECONDS_MAX),
}
_STAGES = _Rule("stages", 1, STAGES_MAX, whole=True)
_MACHINES = _Rule("machines.count", 1, MACHINES_MAX, whole=True)
_RANKS = _Rule("machines.ranks_per_machine", 1, STAGES_MAX, whole=True)
_RULES = {
    "microbatches": _Rule("microbatches", 1, 1_000_000, whole=True),
    "forward_s": _Rule("forward_s", 0, SECONDS_MAX, "stage"),
    "backward_s": _Rule("backward_s", 0, SECONDS_MAX, "stage"),
    "update_s": _Rule("update_s", 0, SECONDS_MAX, "stage"),
    "step_s": _Rule("step_s", SECONDS_MIN, SECONDS_MAX),
    "forward_bytes": _Rule("forward_bytes", 0, BYTES_MAX, "boundary", whole=True),
    "backward_bytes": _Rule("backward_bytes", 0, BYTES_MAX, "boundary", whole=True),
    "other_bytes": _Rule("other_bytes", 0, BYTES_MAX, whole=True),
    "machine_of_stage": _Rule("machines.of_stage", 0, MACHINES_MAX - 1, "stage", whole=True),
    "log_write_bytes_per_s": _Rule("log.write_bytes_per_s", 1, RATE_MAX),
    "log_read_bytes_per_s": _Rule("log.read_bytes_per_s", 1, RATE_MAX),
    "log_copy_bytes_per_s": _Rule("log.copy_bytes_per_s", 1, RATE_MAX),
    "network_bytes_per_s": _Rule("network_bytes_per_s", 1, RATE_MAX),
    "checkpoint_interval_steps": _Rule("checkpoint.interval_steps", 1, 1_000_000_000, whole=True),
    "checkpoint_bytes": _Rule("checkpoint.bytes", 0, BYTES_MAX, "stage", whole=True),
    "checkpoint_bytes_per_s": _Rule("checkpoint.bytes_per_s", 1, RATE_MAX),
    "checkpoint_stall_s": _Rule("checkpoint.stall_s", 0, SECONDS_MAX),
    "machine_mtbf_s": _Rule("failures.machine_mtbf_s", SECONDS_MIN, SECONDS_MAX, "machine"),
    "fixed_s": _Rule("fixed_s", 0, SECONDS_MAX),
    "copies_max": _Rule("parallel.copies_max", 1, COPIES_MAX, whole=True),
    "gradient_bytes": _Rule("parallel.gradient_bytes", 0, BYTES_MAX, "stage", whole=True),
}
"""Attribute of `Profile` -> rule."""
_PARTS = {rule.path.partition(".")[0] for rule in _RULES.values() if "." in rule.path}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """Limit of a plan: storage_bytes, recovery_s or worst_recovery_s."""

    kind: str
    value: float

    def __post_init__(self) -> None:
        if self.kind not in _CAPS:
            raise UsageError(f"cap: there is no {_shown(self.kind)}; there are: {', '.join(_CAPS)}")
        _check(self.value, _CAPS[self.kind])


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Checked profile. Raises UsageError if a field is invalid."""

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
    copies_max: int = 1
    """Number of copies of the lost group that may replay, each with its share of the microbatches."""
    gradient_bytes: tuple[int, ...] | None = None
    """Per stage: bytes that the copies reduce after every replayed step; None: none."""
    cap: Cap | None = None

    def __post_init__(self) -> None:
        for text, where in ((self.name, "name"), (self.source, "source")):
            if not isinstance(text, str) or not text.isprintable():
                raise UsageError(f"{where}: must be one line of text, not {_shown(text)}")
        _check(self.stages, _STAGES)
        counts = _counts(self.stages, self.machine_of_stage)
        for attribute, rule in _RULES.items():
            value = getattr(self, attribute)
            if value is None:
                continue
            if rule.of:
                _length(value, rule, counts)
                for index, entry in enumerate(value):
                    _check(entry, rule, f"[{index}]")
            else:
                _check(value, rule)
        for stage, (forward, backward) in enumerate(zip(self.forward_s, self.backward_s, strict=True)):
            if forward + backward < SECONDS_MIN:
                raise UsageError(f"forward_s and backward_s: stage {stage} computes nothing; give its times")
        for boundary, sizes in enumerate(zip(self.forward_bytes, self.backward_bytes, strict=True)):
            if sum(sizes) == 0:
                raise UsageError(
                    f"forward_bytes and backward_bytes: nothing crosses boundary {boundary}; give what does"
                )
        last = -1
        for stage, machine in enumerate(self.machine_of_stage):
            if not last <= machine <= last + 1:
                raise UsageError(
                    f"machines.of_stage: stage {stage} is on machine {machine} after machine {max(last, 0)}; number "
                    "machines from 0 in the order of their stages, each with neighbouring stages only"
                )
            last = machine
        if self.copies_max > 1 and self.network_bytes_per_s is None:
            raise UsageError("network_bytes_per_s: is missing, and parallel.copies_max above 1 needs it")

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def machines(self) -> int:
        return len(self.machine_mtbf_s)

    def document(self) -> dict[str, Any]:
        """Returns the JSON document that `parse` reads; for programs that measure a job."""
        made: dict[str, Any] = {"profile": FORMAT, "name": self.name, "source": self.source}
        made["stages"] = self.stages
        for attribute, rule in _RULES.items():
            value, (part, _, name) = getattr(self, attribute), rule.path.rpartition(".")
            if value is not None:
                holder = made.setdefault(part, {}) if part else made
                holder[name] = list(value) if rule.of else value
        if self.cap is not None:
            made["cap"] = {self.cap.kind: self.cap.value}
        return made


_OPTIONAL = {field.name for field in fields(Profile) if field.default is not MISSING}


def read(path: Path) -> Profile:
    """Reads a profile. Raises UsageError if the file cannot be read or is no valid profile."""
    content = read_given(path, str(path))
    try:
        return parse(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def parse(text: str | bytes) -> Profile:
    """Parses a document. Raises UsageError, in one line, if it is invalid."""
    given = _flattened(parse_json(text))
    version = given.pop("profile", None)
    if version != FORMAT or isinstance(version, bool):
        raise UsageError(f"profile: must be {FORMAT}, the version of the format, not {_shown(version)}")
    stages = _check(given.pop("stages", None), _STAGES)
    if "machines.of_stage" not in given:
        given["machines.of_stage"] = _machines(given, stages)
    if not isinstance(given["machines.of_stage"], list):
        raise UsageError("machines.of_stage: must be a list of machines")
    counts = _counts(stages, given["machines.of_stage"])
    values: dict[str, Any] = {name: given.pop(name) for name in ("name", "source") if name in given}
    if "cap" in given:
        values["cap"] = _cap(given.pop("cap"))
    for attribute, rule in _RULES.items():
        if rule.path in given:
            value = given.pop(rule.path)
            values[attribute] = _entries(value, rule, counts) if rule.of else _check(value, rule)
    for path in given:
        raise UsageError(f"{_shown(path)[1:-1]}: there is no such field")
    for attribute in ("name", *_RULES):
        if attribute not in _OPTIONAL and attribute not in values:
            raise UsageError(f"{_RULES[attribute].path if attribute in _RULES else attribute}: is missing")
    return Profile(**values)


def _counts(stages: int, machine_of_stage: Sequence[Any]) -> dict[str, int]:
    """Returns the length of a list by what it is of. The machines may still be anything."""
    return {"stage": stages, "boundary": stages - 1, "machine": len(set(map(str, machine_of_stage)))}


def _flattened(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise UsageError(f"a profile: must be an object, not {_shown(document)}")
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if name not in _PARTS:
            flat[name] = value
        elif isinstance(value, dict):
            flat |= {f"{name}.{inner}": entry for inner, entry in value.items()}
        else:
            raise UsageError(f"{name}: must be an object, not {_shown(value)}")
    return flat


def _machines(given: dict[str, Any], stages: int) -> list[int]:
    count = _check(given.pop(_MACHINES.path, None), _MACHINES)
    ranks = _check(given.pop(_RANKS.path, None), _RANKS)
    if count * ranks != stages:
        raise UsageError(
            f"machines: {count} machines of {ranks} ranks are not {stages} stages; "
            "give machines.of_stage, the machine of every stage"
        )
    return [stage // ranks for stage in range(stages)]


def _cap(value: Any) -> Cap:
    if not isinstance(value, dict) or len(value) != 1:
        raise UsageError(f"cap: give one of {', '.join(_CAPS)}")
    ((kind, limit),) = value.items()
    return Cap(kind=kind, value=limit)


def _entries(value: Any, rule: _Rule, counts: dict[str, int]) -> tuple[Any, ...]:
    """Returns a list's entries, or one number for all of them."""
    if isinstance(value, list):
        _length(value, rule, counts)
        return tuple(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{rule.path}: must be a number or a list of numbers, not {_shown(value)}")
    return (value,) * counts[rule.of]


def _shown(value: Any) -> str:
    """Formats a value of the document for a message: on one line, shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]}..."


def _check(value: Any, rule: _Rule, index: str = "") -> Any:
    if value is None:
        raise UsageError(f"{rule.path}{index}: is missing")
    kind = int if rule.whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind):
        what = "a whole number" if rule.whole else "a number"
        raise UsageError(f"{rule.path}{index}: must be {what}, not {_shown(value)}")
    if not rule.least <= value <= rule.most:  # also rejects NaN
        raise UsageError(
            f"{rule.path}{index}: must be from {rule.least:g} to {rule.most:g}, not {_shown(value)}"
        )
    return value


def _length(values: Sequence[Any], rule: _Rule, counts: dict[str, int]) -> None:
    if len(values) != (count := counts[rule.of]):
        plural = "boundaries" if rule.of == "boundary" else f"{rule.of}s"
        raise UsageError(
            f"{rule.path}: must have an entry for every {rule.of}: {count} {plural if count != 1 else rule.of}, not "
            f"{len(values)}"
        )
