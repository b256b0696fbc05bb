"""What ranks reach without replay, and how.

A rank reaches what it holds (KEEP), what finishing its step leads to (ROLL_FORWARD) and what taking it back
leads to (UNDO). A shard of a stage group reaches what one of its replicas reaches: the others copy it (REPLICA).
A stage group reaches what all of its shards reach.

Of the ways to one version a rank's own beats a copy, if it leads there bit for bit: it moves no bytes, and it is not
lost with the rank that gives them. Its own are tried in the order KEEP, ROLL_FORWARD, UNDO.

    some replica gets there exactly     those who do so by themselves do; the others copy it from them
    by an inexact undo alone            one replica undoes, all others copy that: two undos of different buckets
                                        do not give the same bits, and replicas must
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swift.recovery.assignment import Assignment
from swift.recovery.types import Report, Strategy

WAYS = frozenset({Strategy.KEEP, Strategy.ROLL_FORWARD, Strategy.UNDO, Strategy.REPLICA})


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How one rank gets to a version without replay."""

    strategy: Strategy
    exact: bool = True
    sources: tuple[int, ...] = ()
    """REPLICA: nearest first."""


class Reach:
    """What is reached by the `allowed` ways of WAYS; by inexact undos only if `inexact`."""

    def __init__(
        self,
        reports: Iterable[Report],
        assignment: Assignment,
        allowed: Iterable[Strategy] = WAYS,
        *,
        inexact: bool = False,
    ) -> None:
        self._reports = {report.rank: report for report in reports}
        self._assignment = assignment
        self._allowed = frozenset(allowed)
        self._inexact = inexact
        self._groups = {group: self._of_group(group) for group in assignment.groups()}

    def anywhere(self) -> frozenset[int]:
        """The versions that some rank reaches by itself."""
        return frozenset(version for rank in self._reports for version in self.of_rank(rank))

    def everywhere(self) -> frozenset[int]:
        """The versions that every stage group reaches."""
        return frozenset.intersection(*self._groups.values())

    def of_rank(self, rank: int) -> frozenset[int]:
        report = self._reports[rank]
        named = {report.version, report.forward_to, report.undo_to} - {None}
        return frozenset(version for version in named if version is not None and self._own(rank, version))

    def of_group(self, group: tuple[int, ...]) -> frozenset[int]:
        return self._groups[group]

    def ways(self, group: tuple[int, ...], version: int) -> Mapping[int, Way]:
        """How each rank of `group` gets to `version`, one of `of_group(group)`."""
        assert version in self._groups[group]
        ways: dict[int, Way] = {}
        for replicas in self._shards(group):
            ways |= self._shard_ways(replicas, version)
        return ways

    # --- ---

    def _of_group(self, group: tuple[int, ...]) -> frozenset[int]:
        return frozenset.intersection(*(self._of_shard(replicas) for replicas in self._shards(group)))

    def _of_shard(self, replicas: Sequence[int]) -> frozenset[int]:
        versions = frozenset(version for rank in replicas for version in self.of_rank(rank))
        if Strategy.REPLICA in self._allowed:
            return versions
        return frozenset(version for version in versions if self._each_reaches(replicas, version))

    def _each_reaches(self, replicas: Sequence[int], version: int) -> bool:
        ways = [self._own(rank, version) for rank in replicas]
        return all(way and (way.exact or len(replicas) == 1) for way in ways)

    def _shard_ways(self, replicas: Sequence[int], version: int) -> dict[int, Way]:
        own = {rank: way for rank in replicas if (way := self._own(rank, version))}
        if Strategy.REPLICA not in self._allowed:
            return own
        sources = [rank for rank, way in own.items() if way.exact] or list(own)[:1]
        return {
            rank: own[rank]
            if rank in sources
            else Way(
                strategy=Strategy.REPLICA,
                sources=tuple(sorted(sources, key=lambda source: self._distance(rank, source))),
            )
            for rank in replicas
        }

    def _own(self, rank: int, version: int) -> Way | None:
        """How `rank` gets to `version` by itself; None: it does not."""
        report = self._reports[rank]
        if report.version == version and Strategy.KEEP in self._allowed:
            return Way(strategy=Strategy.KEEP)
        if report.forward_to == version and Strategy.ROLL_FORWARD in self._allowed:
            return Way(strategy=Strategy.ROLL_FORWARD)
        undone = report.undo_to == version and Strategy.UNDO in self._allowed
        if undone and (report.undo_exact or self._inexact):
            return Way(strategy=Strategy.UNDO, exact=report.undo_exact)
        return None

    def _shards(self, group: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The replicas of each shard, ascending."""
        by_shard: dict[int, list[int]] = {}
        for rank in group:
            by_shard.setdefault(self._assignment.slots[rank].shard, []).append(rank)
        return [tuple(replicas) for _, replicas in sorted(by_shard.items())]

    def _distance(self, rank: int, source: int) -> tuple[bool, int, int]:
        """Another host is farther than any rank; unknown hosts are other ones."""
        mine, theirs = self._reports[rank].host, self._reports[source].host
        return not mine or mine != theirs, abs(rank - source), source
