"""Figures out of a file: the JSON of a bench, or names and values. Pure.

- `swift-ft bench recovery --json`: for each strategy, what all wait for after a fault: the time from the kill to the
  next new step, without that step and without the steps that were done again; and what a session adds to a step.
- `swift-ft bench coordinator --json`: the seconds of a recovery for each member, of the largest case.
- `{"step_s": 5.5, "load_s": 40, "stop_s": {"restart": 300}}`: figures by name, and stops by strategy.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swift.errors import UsageError
from swift.plan.goodput import figures, ways

SYSTEMS = {
    "torchrun": (ways.RESTART,),
    "swift": (ways.AUTO, ways.REPLICA),
    "swift-checkpoint": (ways.CHECKPOINT,),
    "swift-reinit": (ways.REINIT,),
    "swift-snapshot": (ways.SNAPSHOT,),
    "swift-shrink": (ways.SHRINK,),
    "swift-replay": (ways.REPLAY,),
}
"""System of the bench -> strategies. In the bench two replicas run, so `auto` has copied one."""
BYTES_MAX = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a file says."""

    figures: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Name -> value and source."""
    stops: Mapping[str, float] = field(default_factory=dict)
    """Strategy -> seconds."""


def parse(text: str, name: str) -> Measured:
    """`name`: of the file, for the source. UsageError says in one line what is wrong with it."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("is no JSON: give what swift-ft bench recovery --json has written") from None
    if not isinstance(document, dict):
        raise UsageError('is no object: give names and values, such as {"load_s": 40}')
    if document.get("bench") == "recovery":
        return _recovery(document, f"swift-ft bench recovery ({name})")
    if "cases" in document and all("members" in case for case in _cases(document)):
        return _coordinator(document, f"swift-ft bench coordinator ({name})")
    return _plain(document, name)


def _number(holder: Any, key: str, where: str) -> float:
    value = holder.get(key) if isinstance(holder, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= figures.VALUE_MAX:
        raise UsageError(f"{where}: {key} must be a number, 0 or more")
    return float(value)


def _cases(document: dict[str, Any]) -> list[dict[str, Any]]:
    cases = document.get("cases")
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases) or not cases:
        raise UsageError("has no cases: give the whole JSON of the bench")
    return cases


def _recovery(document: dict[str, Any], source: str) -> Measured:
    stops: dict[str, float] = {}
    quiet: dict[str, float] = {}
    for number, case in enumerate(_cases(document), start=1):
        where = f"case {number}"
        system = case.get("system")
        if system not in SYSTEMS or "missing" in case or "failed" in case:
            continue
        step_s = _number(case, "step_s", where)
        stop_s = max(0.0, _number(case, "lost_s", where) - _number(case, "steps_again", where) * step_s)
        stops |= dict.fromkeys(SYSTEMS[system], stop_s)
        quiet[system] = _number(case.get("undisturbed"), "step_s", f"{where}, undisturbed")
    if not stops:
        raise UsageError("has no case that went on: give another run of swift-ft bench recovery")
    given = {}
    if {"torchrun", "swift"} <= quiet.keys():
        given["session_s_per_step"] = (max(0.0, quiet["swift"] - quiet["torchrun"]), source)
    return Measured(figures=given, stops=stops)


def _coordinator(document: dict[str, Any], source: str) -> Measured:
    cases = [
        (_number(case, "members", f"case {number}"), _number(case, "recovery_s", f"case {number}"))
        for number, case in enumerate(_cases(document), start=1)
    ]
    members, recovery_s = max(cases)
    if members < 1:
        raise UsageError("has no members: give the whole JSON of swift-ft bench coordinator")
    words = f"{source}: {recovery_s:.3g} s for {members:,.0f} members, in proportion"
    return Measured(figures={"coordinate_s_per_rank": (recovery_s / members, words)})


def _plain(document: dict[str, Any], name: str) -> Measured:
    given: dict[str, tuple[float, str]] = {}
    stops: dict[str, float] = {}
    for key, value in document.items():
        if key == "stop_s":
            if not isinstance(value, dict):
                raise UsageError('stop_s: give strategies and seconds, such as {"restart": 300}')
            stops = {way: _number(value, way, "stop_s") for way in value}
            for way in stops:
                check_way(way, "stop_s")
            continue
        if key not in figures.NAMES:
            figures.check(key, 0.0, "it")
        number = _number(document, key, "it")
        figures.check(key, number, "it")
        given[key] = (number, name)
    return Measured(figures=given, stops=stops)


def check_way(name: str, flag: str) -> None:
    """UsageError, with `flag` in front: there is no such strategy, or its stop cannot be given."""
    known = [way for way in ways.NAMES if way not in (ways.GIVEN, ways.WAIT)]
    if name not in known:
        raise UsageError(f"{flag}: there is no strategy {name!r}; there are {', '.join(map(repr, known))}")


def value_of(name: str, text: str) -> float | None:
    """Of a figure; only times have a unit. None: it is no number."""
    return duration(text) if name.endswith("_s") or not text[-1:].isalpha() else None


def duration(text: str) -> float | None:
    """Seconds of 90, 90s, 30min, 20h or 264d. None: it is none of these."""
    units = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "d": figures.DAY_S}
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :]
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        return None
    return value if math.isfinite(value) and value >= 0 else None
