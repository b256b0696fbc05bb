"""A cluster: ranks, nodes and replicas; the times of faults, by distribution or by a trace; the duration of repairs.

Times are seconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from swift_ft.errors import UsageError

FAULTS_MIN = 10
"""Smallest number of faults from which the distribution of their times can be estimated."""
RANKS_MAX = 1_000_000
CV_MIN, CV_MAX = 0.1, 10.0
SHAPE_MIN, SHAPE_MAX = 0.2, 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Faults in order of their times."""

    gaps_s: tuple[float, ...]
    """Time from each fault to the next; 0 for simultaneous faults."""
    outages_s: tuple[float, ...]
    """Outage of each fault except the first; same length as `gaps_s`."""
    nodes: int
    """Number of different nodes in the trace."""

    @classmethod
    def of(cls, faults: Sequence[tuple[float, float, str]]) -> "Trace":
        """Takes the start, the end and the node of each fault. Raises UsageError, in one line, if there are too few."""
        if len(faults) < FAULTS_MIN:
            raise UsageError(f"has {len(faults)} faults that ended: give {FAULTS_MIN} or more")
        faults = sorted(faults)
        gaps = tuple(later - start for (start, _, _), (later, _, _) in pairwise(faults))
        if not sum(gaps) > 0:
            raise UsageError("has all its faults at the same moment: give their times")
        outages = tuple(end - start for start, end, _ in faults[1:])
        return cls(gaps_s=gaps, outages_s=outages, nodes=len({node for _, _, node in faults}))

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
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if not 1.0 <= self.mtbf_s <= 1e12:
            raise UsageError(f"--machine-mtbf {self.mtbf_s:g}: give 1 s to 1e12 s, such as 264d")

    @property
    def exponential(self) -> bool:
        return self.shape == 1.0 and self.trace is None

    @property
    def cv(self) -> float:
        """Coefficient of variation of the times between faults."""
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
    from scipy.optimize import brentq  # takes longer to import than all the rest of the command

    return float(brentq(lambda shape: cv_of(shape) - cv, SHAPE_MIN, SHAPE_MAX))
