"""REPLICA: a copy of the state that other ranks hold."""

from collections.abc import Callable, Mapping, Sequence

from swift.recovery.strategies.policy import Begins, Policy, Way, held
from swift.recovery.types import FROM_CHECKPOINT, Report, Strategy


class Replica(Policy):
    """Receives the state from ranks that hold the same one. Moves all its bytes.

    A rank's own way beats a copy if it leads there bit for bit: it moves no bytes, and is not lost with the rank that
    gives them.

        some replica gets there exactly     those who do so by themselves do; the others copy it from them
        by an inexact way alone             one replica goes it, all others copy that: two undos of different buckets
                                            do not give the same bits, and replicas must
    """

    strategy = Strategy.REPLICA
    begins = Begins.COPY
    excluded_by = FROM_CHECKPOINT | {"replay", "snapshot"}

    def share(
        self, own: Mapping[int, Way], replicas: Sequence[int], distance: Callable[[int, int], object]
    ) -> Mapping[int, Way]:
        sources = [rank for rank, way in own.items() if way.exact] or list(own)[:1]
        version = own[sources[0]].version
        return {
            rank: own[rank]
            if rank in sources
            else Way(
                by=self,
                version=version,
                sources=tuple(sorted(sources, key=lambda source: distance(rank, source))),  # type: ignore[arg-type, return-value]
            )
            for rank in replicas
        }

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        sources = ways[report.rank].sources
        given = ", ".join(
            f"rank {rank} {ways[rank].by.verb} version {ways[rank].version}" for rank in sources
        )
        return f"{held(report)}; {given}"
