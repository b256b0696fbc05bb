"""What ranks reach without replay, and how.

A rank reaches what strategies lead it to by itself: what it holds, what finishing its step leads to, what taking it
back leads to. A shard of a stage group reaches what one of its replicas reaches: the others copy it. A stage group
reaches what all of its shards reach.

Of the ways to one version a rank's own beats a copy, if it leads there bit for bit (`strategies/replica.py`). Its own
are tried in the order of the table.
"""

from collections.abc import Iterable, Mapping, Sequence

from swift.recovery.assignment import Assignment
from swift.recovery.strategies import TABLE, Begins, Way
from swift.recovery.types import Report, Strategy


class Reach:
    """What is reached by the `allowed` strategies; in ways that are not exact only if `inexact`."""

    def __init__(
        self,
        reports: Iterable[Report],
        assignment: Assignment,
        allowed: Iterable[Strategy] = TABLE,
        *,
        inexact: bool = False,
    ) -> None:
        self._reports = {report.rank: report for report in reports}
        self._assignment = assignment
        policies = [TABLE[strategy] for strategy in TABLE if strategy in frozenset(allowed)]
        self._own_policies = [policy for policy in policies if policy.begins is Begins.OWN]
        self._copies = next((policy for policy in policies if policy.begins is Begins.COPY), None)
        self._inexact = inexact
        self._own = {rank: self._own_ways(report) for rank, report in self._reports.items()}
        for group in assignment.groups():
            self._leave_out_alone(group)
        self._groups = {group: self._of_group(group) for group in assignment.groups()}

    def anywhere(self) -> frozenset[int]:
        """The versions that some rank reaches by itself."""
        return frozenset(version for rank in self._reports for version in self.of_rank(rank))

    def everywhere(self) -> frozenset[int]:
        """The versions that every stage group reaches."""
        return frozenset.intersection(*self._groups.values())

    def of_rank(self, rank: int) -> frozenset[int]:
        return frozenset(self._own[rank])

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
        if self._copies is not None:
            return versions
        return frozenset(version for version in versions if self._each_reaches(replicas, version))

    def _each_reaches(self, replicas: Sequence[int], version: int) -> bool:
        ways = [self._own[rank].get(version) for rank in replicas]
        return all(way and (way.exact or len(replicas) == 1) for way in ways)

    def _shard_ways(self, replicas: Sequence[int], version: int) -> Mapping[int, Way]:
        own = {rank: way for rank in replicas if (way := self._own[rank].get(version))}
        return own if self._copies is None else self._copies.share(own, replicas, self._distance)

    def _own_ways(self, report: Report) -> dict[int, Way]:
        """version -> how the rank gets there by itself: the first way of several."""
        ways: dict[int, Way] = {}
        for policy in self._own_policies:
            way = policy.reach(report)
            if way is not None and (way.exact or self._inexact):
                ways.setdefault(way.version, way)
        return ways

    def _leave_out_alone(self, group: tuple[int, ...]) -> None:
        """No rank finishes together with others a step that one of them is not in."""
        for version in {version for rank in group for version in self._own[rank]}:
            ways = {rank: self._own[rank].get(version) for rank in group}
            if all(way is not None and way.by.finishes_step for way in ways.values()):
                continue
            for rank, way in ways.items():
                if way is not None and way.by.together:
                    del self._own[rank][version]

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
