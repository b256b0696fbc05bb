"""Reads a trace of a cluster's faults: the times of each fault and of the return of its node.

There are two formats. CSV, whose first line names the columns in any order: `node`, and `start` and `end` with their
unit (`start_s`, `start_h` or `start_days`); further columns are ignored. And the JSON of InfiniteHBD-Trace: a list of
events with `node_id`, `event_time` in days, `event_type` (`fault_start` or `fault_end`) and `fault_type`.
"""

import csv
import json
import math
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise

from swift_ft.errors import UsageError
from swift_ft.lab.goodput.figures import DAY_S
from swift_ft.text import parse_json

FAULTS_MAX = 1_000_000
TIME_MAX_S = 1e12
FAULTS_MIN = 10
"""Smallest number of faults from which the distribution of their times can be estimated."""
_UNITS = {"s": 1.0, "h": 3600.0, "days": DAY_S}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Faults in order of their times."""

    gaps_s: tuple[float, ...]
    """Time from each fault to the next; 0 for simultaneous faults."""
    outages_s: tuple[float, ...]
    """Outage of each fault except the first; same length as `gaps_s`."""
    nodes: int
    """Number of different nodes in the trace."""

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
        """Share of faults that are simultaneous with the previous one."""
        return sum(gap == 0 for gap in self.gaps_s) / len(self.gaps_s)

    @property
    def repair_s(self) -> float:
        return sum(self.outages_s) / len(self.outages_s)


def parse(text: str) -> Trace:
    """Parses a trace in either format. Raises UsageError, in one line, if it is invalid."""
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
    if not -TIME_MAX_S <= start_s <= end_s <= TIME_MAX_S:
        raise UsageError(
            f"{where}: a fault ends when it begins or later, within {TIME_MAX_S:g} s of the time 0"
        )


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
    events = parse_json(text)
    if not isinstance(events, list) or len(events) > 2 * FAULTS_MAX:
        raise UsageError("is no list of events: give the JSON of InfiniteHBD-Trace, or CSV")
    begun: dict[tuple[str, str], deque[float]] = {}
    faults = []
    for number, event in enumerate(events, start=1):
        where = f"event {number}"
        try:
            node, kind, at = event["node_id"], event["event_type"], float(event["event_time"]) * DAY_S
            key = (str(node), json.dumps(event.get("fault_type"), sort_keys=True))
        except (TypeError, KeyError, ValueError, OverflowError, AttributeError):
            raise UsageError(f"{where}: write node_id, event_type and event_time (days)") from None
        if kind == "fault_start":
            begun.setdefault(key, deque()).append(at)
        elif kind == "fault_end" and begun.get(key):
            start = begun[key].popleft()
            _checked(start, at, where)
            faults.append((start, at, key[0]))
        else:
            raise UsageError(f"{where}: event_type is fault_start, or fault_end after it")
    return faults


# A cluster: ranks, nodes and replicas; the rate of faults, and the duration of repairs. Times are seconds.

RANKS_MAX = 1_000_000
CV_MIN, CV_MAX = 0.1, 10.0
SHAPE_MIN, SHAPE_MAX = 0.2, 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A job on `ranks` ranks with `replicas` copies of the model."""

    ranks: int
    ranks_per_node: int
    replicas: int
    stages: int
    """Stages of the pipeline."""
    microbatches: int
    """Microbatches of each replica in a step."""
    spares: int | None = None
    """Spare nodes that replace lost ones. None: always enough."""

    def __post_init__(self) -> None:
        for flag, value, least, most in (
            ("--ranks", self.ranks, 2, RANKS_MAX),
            ("--ranks-per-node", self.ranks_per_node, 1, self.ranks),
            ("--replicas", self.replicas, 1, self.ranks),
            ("--stages", self.stages, 1, 65536),
            ("--microbatches", self.microbatches, 1, 65536),
            ("--spares", self.spares or 0, 0, RANKS_MAX),
        ):
            if not least <= value <= most:
                raise UsageError(f"{flag} {value}: give {least} to {most}")
        if self.ranks % self.ranks_per_node:
            raise UsageError(
                f"--ranks {self.ranks}: give a multiple of the {self.ranks_per_node} ranks of a node, or "
                "--ranks-per-node"
            )
        if self.ranks % self.replicas:
            raise UsageError(f"--replicas {self.replicas}: give a number that divides {self.ranks} ranks")
        if self.stages > self.replica_ranks:
            raise UsageError(
                f"--stages {self.stages}: a replica has {self.replica_ranks} ranks; give as many at most, or another "
                "--replicas"
            )

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def replica_ranks(self) -> int:
        return self.ranks // self.replicas

    @property
    def holders(self) -> int:
        """Number of nodes that hold the same part of the model (all of it, if a node has several replicas)."""
        return min(self.replicas, self.nodes)

    @property
    def parts(self) -> int:
        """Number of parts of the model on different nodes."""
        return max(1, math.ceil(self.nodes / self.replicas))

    def resized(self, ranks: int) -> "Cluster":
        """Returns the cluster with another number of ranks: as many whole replicas of the same model as fit. Without
        replicas, the model itself has another size."""
        if self.replicas == 1:
            return replace(self, ranks=ranks, stages=min(self.stages, ranks))
        return replace(self, ranks=ranks, replicas=ranks // self.replica_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Fault process of a job: one fault in `mtbf_s / nodes` on average, regardless of the job's state.

    The times between two faults of the job are exponential, Weibull, or those of a trace in their order. If many nodes
    have independent Weibull times, the job's are nearly exponential (Palm and Khintchine).
    """

    mtbf_s: float
    """Mean time between failures of a node."""
    shape: float = 1.0
    """Weibull shape of the times between two faults of the job; 1: exponential."""
    together: float = 0.0
    """Share of faults that are simultaneous with the previous one."""
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if not 1.0 <= self.mtbf_s <= 1e12:
            raise UsageError(f"--machine-mtbf {self.mtbf_s:g}: give 1 s to 1e12 s, such as 264d")
        if not 0 <= self.together <= 0.9:
            raise UsageError(f"--together {self.together:g}: give a share of 0 to 0.9")

    @property
    def exponential(self) -> bool:
        return self.shape == 1.0 and self.trace is None

    @property
    def cv(self) -> float:
        """Coefficient of variation of the times between faults, without simultaneous ones unless from a trace."""
        return self.trace.cv if self.trace is not None else cv_of(self.shape)

    def job_mtbf_s(self, cluster: Cluster) -> float:
        return self.mtbf_s / cluster.nodes


def cv_of(shape: float) -> float:
    """Returns the coefficient of variation of a Weibull distribution: sqrt(gamma(1 + 2 / k) / gamma(1 + 1 / k)^2 -
    1)."""
    return math.sqrt(math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)))


def shape_of(cv: float) -> float:
    """Returns the Weibull shape with this coefficient of variation. Raises UsageError if it is out of bounds."""
    if cv == 1.0:
        return 1.0
    if not CV_MIN <= cv <= CV_MAX:
        raise UsageError(f"--cv {cv:g}: give {CV_MIN:g} to {CV_MAX:g}; 1 is exponential")
    low, high = SHAPE_MIN, SHAPE_MAX
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if cv_of(middle) > cv else (low, middle)
    return (low + high) / 2
