"""A cluster: ranks, nodes and replicas."""

import math
from dataclasses import dataclass

from swift_ft.errors import UsageError

RANKS_MAX = 1_000_000


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
        return max(1, math.ceil(self.nodes / self.replicas))
