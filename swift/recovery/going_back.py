"""Everybody goes back to an older version: to the newest snapshot that is left of every rank, or to a checkpoint.

A version of a snapshot counts if of every rank's state somebody has a copy: the rank itself, or another one that keeps
it. All copies of one version are of one moment, so it does not matter who gives them. If the newest complete checkpoint
is newer, it is taken.
"""

from collections.abc import Mapping, Sequence

from swift.recovery.decision import Plan, RankPlan
from swift.recovery.types import Checkpoints, Report, Strategy

_NAMED_MAX = 64


def go_back(
    reports: Sequence[Report], checkpoints: Checkpoints, why: str, *, snapshots: bool
) -> tuple[Plan | None, str]:
    """`why` nothing newer will do. `snapshots`: they may be used. (None, reason) if there is nothing to go back to."""
    if not snapshots:
        return _to_checkpoint(reports, checkpoints, why)
    copies = _copies(reports)
    whole = [version for version, held in copies.items() if all(r.rank in held for r in reports)]
    if not whole:
        return _to_checkpoint(reports, checkpoints, _and(why, _lacking(reports, copies)))
    version = max(whole)
    if checkpoints.newest is not None and checkpoints.newest > version:
        older = f"the newest whole snapshot is of version {version}"
        return _to_checkpoint(reports, checkpoints, _and(why, older))
    held = copies[version]
    ranks = tuple(
        RankPlan(
            rank=r.rank,
            strategy=Strategy.SNAPSHOT,
            from_version=version,
            reason=why,
            sources=() if r.rank in held[r.rank] else (_nearest(r, held[r.rank], reports),),
        )
        for r in reports
    )
    reason = f"every rank goes back to its snapshot of version {version}: {why}"
    return Plan(target_version=version, ranks=ranks, collective_source=-1, reason=reason), reason


def _to_checkpoint(reports: Sequence[Report], checkpoints: Checkpoints, why: str) -> tuple[Plan | None, str]:
    version = checkpoints.newest
    if version is None:
        return None, f"{why}; there is no complete checkpoint to go back to"
    ranks = tuple(
        RankPlan(rank=r.rank, strategy=Strategy.CHECKPOINT, from_version=version, reason=why) for r in reports
    )
    reason = f"every rank restores the checkpoint of version {version}: {why}"
    return Plan(target_version=version, ranks=ranks, collective_source=-1, reason=reason), reason


def _and(why: str, more: str) -> str:
    """Once, however often this is planned in one recovery."""
    return why if more in why else f"{why}; {more}"


def _copies(reports: Sequence[Report]) -> dict[int, dict[int, list[int]]]:
    """Version -> rank -> who holds a copy of its state."""
    copies: dict[int, dict[int, list[int]]] = {}
    for report in reports:
        for held in report.snapshots:
            copies.setdefault(held.version, {}).setdefault(held.rank, []).append(report.rank)
    return copies


def _nearest(report: Report, holders: Sequence[int], reports: Sequence[Report]) -> int:
    """On the rank's own host, if hosts are known and one is there."""
    host_of = {other.rank: other.host for other in reports}
    return min(holders, key=lambda rank: (not report.host or host_of[rank] != report.host, rank))


def _lacking(reports: Sequence[Report], copies: Mapping[int, Mapping[int, object]]) -> str:
    """Why no version is whole."""
    held = {rank for of_ranks in copies.values() for rank in of_ranks}
    lost = [r.rank for r in reports if r.rank not in held]
    if not lost:
        return "no version of the snapshots is left of all ranks"
    more = len(lost) - _NAMED_MAX
    named = ", ".join(map(str, lost[:_NAMED_MAX])) + (f" and {more} more" if more > 0 else "")
    return f"no snapshot of rank{'s' if len(lost) > 1 else ''} {named} is left"
