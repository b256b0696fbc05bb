"""A cluster: ranks, nodes and replicas; how often a fault comes, and how long a repair takes. Times are seconds."""

import math
from dataclasses import dataclass, replace

from swift.errors import UsageError
from swift.plan.goodput.trace import Trace

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
