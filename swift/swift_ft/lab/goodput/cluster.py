"""Faults of a cluster, as a file: when a fault came, and when its node was back.

Two formats. CSV, with a first line that names the columns in any order: `node`, and `start` and `end` with their unit
(`start_s`, `start_h` or `start_days`); further columns are left alone. And the JSON of InfiniteHBD-Trace: a list of
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


# A cluster: ranks, nodes and replicas; how often a fault comes, and how long a repair takes. Times are seconds.

RANKS_MAX = 1_000_000
CV_MIN, CV_MAX = 0.1, 10.0
SHAPE_MIN, SHAPE_MAX = 0.2, 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A job on `ranks` ranks, `replicas` times the same model."""

    ranks: int
    ranks_per_node: int
    replicas: int
    stages: int
    """Of the pipeline."""
    microbatches: int
    """Of each replica in a step."""
    spares: int | None = None
    """Nodes that wait for a loss. None: enough."""

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
        """Nodes that hold the same part of the model; all of it, where a node has several replicas."""
        return min(self.replicas, self.nodes)

    @property
    def parts(self) -> int:
        """Parts of the model, each on other nodes."""
        return max(1, math.ceil(self.nodes / self.replicas))

    def resized(self, ranks: int) -> "Cluster":
        """The same model on another number of ranks, of whole replicas. Without replicas, another model."""
        if self.replicas == 1:
            return replace(self, ranks=ranks, stages=min(self.stages, ranks))
        return replace(self, ranks=ranks, replicas=ranks // self.replica_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """How faults come to a job: one in `mtbf_s / nodes` on average, whatever the job does meanwhile.

    The times between two faults of the job are exponential, Weibull's, or those of a trace in their order. Where nodes
    have Weibull times of their own and there are many nodes, the job's are nearly exponential (Palm and Khintchine).
    """

    mtbf_s: float
    """Of a node."""
    shape: float = 1.0
    """Weibull's, of the times between two faults of the job; 1: exponential."""
    together: float = 0.0
    """The share of faults that come at the same moment as the one before."""
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if not 1.0 <= self.mtbf_s <= 1e12:
            raise UsageError(f"--machine-mtbf {self.mtbf_s:g}: give 1 s to 1e12 s, such as 264d")
        if not SHAPE_MIN <= self.shape <= SHAPE_MAX:
            raise UsageError(f"--weibull-shape {self.shape:g}: give {SHAPE_MIN:g} to {SHAPE_MAX:g}")
        if not 0 <= self.together <= 0.9:
            raise UsageError(f"--together {self.together:g}: give a share of 0 to 0.9")

    @property
    def exponential(self) -> bool:
        return self.shape == 1.0 and self.trace is None

    @property
    def cv(self) -> float:
        """Coefficient of variation of the times between faults (those that come together left out)."""
        return self.trace.cv if self.trace is not None else cv_of(self.shape)

    def job_mtbf_s(self, cluster: Cluster) -> float:
        return self.mtbf_s / cluster.nodes


def cv_of(shape: float) -> float:
    """Of Weibull's distribution: sqrt(gamma(1 + 2 / k) / gamma(1 + 1 / k)^2 - 1)."""
    return math.sqrt(math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)))


def shape_of(cv: float) -> float:
    """The shape with this coefficient of variation. UsageError: there is none within bounds."""
    if cv == 1.0:
        return 1.0
    if not CV_MIN <= cv <= CV_MAX:
        raise UsageError(f"--cv {cv:g}: give {CV_MIN:g} to {CV_MAX:g}; 1 is exponential")
    low, high = SHAPE_MIN, SHAPE_MAX
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if cv_of(middle) > cv else (low, middle)
    return (low + high) / 2
