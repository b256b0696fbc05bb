"""Everybody goes back to an older version: to the newest snapshot that is left of every rank, or to a checkpoint.

A version of a snapshot counts if of every rank's state somebody has a copy: the rank itself, or another one that keeps
it. All copies of one version are of one moment, so it does not matter who gives them. If the newest complete checkpoint
is newer, it is taken.
"""

from collections.abc import Mapping, Sequence

from swift.recovery.decision import Plan, RankPlan
from swift.recovery.measured import RankMeasured
from swift.recovery.types import Checkpoints, Report, Strategy

_NAMED_MAX = 64


def go_back(
    reports: Sequence[Report], checkpoints: Checkpoints, why: str, *, snapshots: bool
) -> tuple[Plan | None, str]:
    """`why` nothing newer will do. `snapshots`: they may be used. (None, reason) if there is nothing to go back to."""
    if not snapshots:
        return _to_checkpoint(reports, checkpoints, why)
    copies = _copies(reports)
    whole = _whole(reports, copies)
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


def sooner(reports: Sequence[Report], replayed: Plan, measured: Mapping[int, RankMeasured]) -> str:
    """Why to go back to the newest whole snapshot rather than to replay: the steps since are done again in less time,
    as far as steps were measured. Empty: it is not so, or it is not known."""
    versions = _whole(reports, _copies(reports))
    behind = [rank.rank for rank in replayed.ranks if rank.from_version < replayed.target_version]
    predicted = {prediction.rank: prediction.seconds for prediction in replayed.predictions}
    steps_s = [measured[report.rank].step_s for report in reports if report.rank in measured]
    if not versions or not steps_s or not predicted.keys() >= set(behind):
        return ""
    again = replayed.target_version - max(versions)
    again_s, replay_s = again * max(steps_s), max(predicted.values(), default=0.0)
    if again < 0 or again_s >= replay_s:
        return ""
    steps = f"{again} step{'' if again == 1 else 's'}"
    return f"{steps} again take {again_s:.3g} s, and a replay {replay_s:.3g} s"


def _whole(reports: Sequence[Report], copies: Mapping[int, Mapping[int, object]]) -> list[int]:
    """The versions of which somebody has a copy of every rank's state."""
    return [version for version, held in copies.items() if all(r.rank in held for r in reports)]


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
