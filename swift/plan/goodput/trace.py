"""Faults of a cluster, as a file: when a fault came, and when its node was back.

Two formats. CSV, with a first line that names the columns in any order: `node`, and `start` and `end` with their unit
(`start_s`, `start_h` or `start_days`); further columns are left alone. And the JSON of InfiniteHBD-Trace: a list of
events with `node_id`, `event_time` in days, `event_type` (`fault_start` or `fault_end`) and `fault_type`.
"""

import csv
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from swift.errors import UsageError
from swift.plan.goodput.figures import DAY_S

BYTES_MAX, FAULTS_MAX = 64 << 20, 1_000_000
FAULTS_MIN = 10
"""Fewer say nothing about how faults follow each other."""
_UNITS = {"s": 1.0, "h": 3600.0, "days": DAY_S}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Faults in the order in which they came."""

    gaps_s: tuple[float, ...]
    """From each fault to the next one; 0 where they came together."""
    outages_s: tuple[float, ...]
    """Of each fault but the first one: as long as `gaps_s`."""
    nodes: int
    """In the trace."""

    @property
    def mean_gap_s(self) -> float:
        return sum(self.gaps_s) / len(self.gaps_s)

    @property
    def cv(self) -> float:
        """Coefficient of variation of the times between faults."""
        mean = self.mean_gap_s
        return math.sqrt(sum((gap - mean) ** 2 for gap in self.gaps_s) / len(self.gaps_s)) / mean

    @property
    def together(self) -> float:
        """The share of faults that came at the moment of the one before."""
        return sum(gap == 0 for gap in self.gaps_s) / len(self.gaps_s)

    @property
    def repair_s(self) -> float:
        return sum(self.outages_s) / len(self.outages_s)


def parse(text: str) -> Trace:
    """UsageError says in one line what is wrong with the file."""
    faults = _events(text) if text.lstrip()[:1] in ("[", "{") else _table(text)
    if len(faults) < FAULTS_MIN:
        raise UsageError(f"has {len(faults)} faults: give {FAULTS_MIN} or more")
    faults.sort()
    starts = [start for start, _, _ in faults]
    gaps = tuple(b - a for a, b in pairwise(starts))
    if not sum(gaps) > 0:
        raise UsageError("has all its faults at the same moment: give their times")
    return Trace(
        gaps_s=gaps,
        outages_s=tuple(end - start for start, end, _ in faults[1:]),
        nodes=len({node for _, _, node in faults}),
    )


def _checked(start_s: float, end_s: float, where: str) -> None:
    if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s <= end_s):
        raise UsageError(f"{where}: a fault ends when it begins or later, at a finite time")


def _table(text: str) -> list[tuple[float, float, str]]:
    lines = text.splitlines()
    if len(lines) > FAULTS_MAX:
        raise UsageError(f"has more than {FAULTS_MAX} lines: give fewer")
    rows = csv.reader(lines, strict=True)
    try:
        head = [name.strip() for name in next(rows, [])]
        columns = {name.partition("_")[0]: (at, name.partition("_")[2]) for at, name in enumerate(head)}
        units = [columns.get(name, (0, ""))[1] for name in ("start", "end")]
        if "node" not in columns or any(unit not in _UNITS for unit in units):
            raise UsageError("line 1: name the columns node, start_h and end_h (or _s, or _days)")
        faults = []
        for row in rows:
            if not row:
                continue
            where = f"line {rows.line_num}"
            try:
                node = row[columns["node"][0]].strip()
                times = [
                    float(row[columns[name][0]]) * _UNITS[unit]
                    for name, unit in zip(("start", "end"), units, strict=True)
                ]
            except (ValueError, IndexError):
                raise UsageError(f"{where}: write a node, a start and an end, both as numbers") from None
            _checked(times[0], times[1], where)
            faults.append((times[0], times[1], node))
    except csv.Error as error:
        raise UsageError(f"line {rows.line_num}: {error}; write CSV") from None
    return faults


def _events(text: str) -> list[tuple[float, float, str]]:
    try:
        events: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("is no JSON: give it whole, or CSV with the columns node, start_h, end_h") from None
    if not isinstance(events, list) or len(events) > 2 * FAULTS_MAX:
        raise UsageError("is no list of events: give the JSON of InfiniteHBD-Trace, or CSV")
    begun: dict[tuple[str, str], list[float]] = {}
    faults = []
    for number, event in enumerate(events, start=1):
        where = f"event {number}"
        try:
            node, kind, at = event["node_id"], event["event_type"], float(event["event_time"]) * DAY_S
            key = (str(node), json.dumps(event.get("fault_type"), sort_keys=True))
        except (TypeError, KeyError, ValueError, AttributeError):
            raise UsageError(f"{where}: write node_id, event_type and event_time (days)") from None
        if kind == "fault_start":
            begun.setdefault(key, []).append(at)
        elif kind == "fault_end" and begun.get(key):
            start = begun[key].pop(0)
            _checked(start, at, where)
            faults.append((start, at, key[0]))
        else:
            raise UsageError(f"{where}: event_type is fault_start, or fault_end after it")
    return faults
