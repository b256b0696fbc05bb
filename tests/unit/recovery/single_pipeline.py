"""The planner of pipelines without replicas, as it was before there were any: the reference for one data-parallel rank.

Kept word for word, but for names that have moved. It knows whole versions only, and a refusal that forbids every
replay.
"""

from collections.abc import Iterable, Mapping, Sequence

from swift_ft.planner import (
    Assignment,
    Checkpoints,
    Plan,
    PlanConfig,
    RankPlan,
    Report,
    Strategy,
    StreamSummary,
)

REPLAYS = (Strategy.CATCH_UP, Strategy.REPLAY)


def reference_plan(
    reports: Sequence[Report],
    assignment: Assignment,
    log_inventory: Mapping[str, StreamSummary],
    checkpoints: Checkpoints,
    config: PlanConfig,
    refused: str = "",
) -> tuple[Plan | None, str]:
    """The plan and its reason; (None, reason) if there is no way back.

    `reports`: one for every rank. `refused`: why nothing is to be replayed (a rank refused it in this
    recovery); "": replay where it can be done.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    if not reports or [r.rank for r in reports] != sorted(set(assignment.stages)):
        raise ValueError("plan needs one report of every rank of the assignment")
    held = [report.version for report in reports if report.version is not None]
    if refused:
        return _restore(reports, checkpoints, refused)
    if config.strategy == "checkpoint":
        return _restore(reports, checkpoints, "the job is configured to restore checkpoints")
    if not held:
        return _restore(reports, checkpoints, "no rank holds a state")

    target = max(held)
    base = checkpoints.newest_at_most(target)
    if base is None and len(held) < len(reports):
        lacking = ", ".join(str(r.rank) for r in reports if r.version is None)
        why = f"no complete checkpoint at version {target} or before for rank {lacking}, which holds no state"
        return _restore(reports, checkpoints, why)
    ranks = tuple(_rank_plan(report, target, base) for report in reports)
    problem = _uncovered(ranks, target, assignment, log_inventory)
    if problem:
        return _restore(reports, checkpoints, problem)
    source, problem = _collective_source(ranks, target, reports, log_inventory)
    if problem:
        return _restore(reports, checkpoints, problem)
    reason = _summary(ranks, target)
    return Plan(target_version=target, ranks=ranks, collective_source=source, reason=reason), reason


def _restore(reports: Sequence[Report], checkpoints: Checkpoints, why: str) -> tuple[Plan | None, str]:
    version = checkpoints.newest
    if version is None:
        return None, f"{why}; there is no complete checkpoint to go back to"
    ranks = tuple(
        RankPlan(rank=r.rank, strategy=Strategy.CHECKPOINT, from_version=version, reason=why) for r in reports
    )
    reason = f"every rank restores the checkpoint of version {version}: {why}"
    return Plan(target_version=version, ranks=ranks, collective_source=-1, reason=reason), reason


def _rank_plan(report: Report, target: int, base: int | None) -> RankPlan:
    held = report.version
    if held == target:
        return RankPlan(
            rank=report.rank, strategy=Strategy.KEEP, from_version=target, reason=f"holds version {target}"
        )
    if held is not None and (base is None or held >= base):
        return RankPlan(
            rank=report.rank,
            strategy=Strategy.CATCH_UP,
            from_version=held,
            reason=f"holds version {held}, {target - held} behind",
        )
    assert base is not None
    lacks = "holds no state" if held is None else f"holds version {held}, older than the checkpoint"
    return RankPlan(
        rank=report.rank,
        strategy=Strategy.REPLAY,
        from_version=base,
        reason=f"{lacks}; the newest complete checkpoint is of version {base}",
    )


def _uncovered(
    ranks: Iterable[RankPlan], target: int, assignment: Assignment, log: Mapping[str, StreamSummary]
) -> str:
    """Why the log cannot feed the replays; "" if it can."""
    by_rank = {rank_plan.rank: rank_plan for rank_plan in ranks}
    for rank_plan in by_rank.values():
        if rank_plan.strategy not in REPLAYS or rank_plan.from_version == target:
            continue
        for stage in assignment.stages[rank_plan.rank]:
            problem = _own_streams_unusable(stage, assignment, log)
            if problem:
                return problem
            for neighbour, direction in ((stage - 1, "F"), (stage + 1, "B")):
                if not 0 <= neighbour < assignment.num_stages:
                    continue
                problem = _input_unusable(rank_plan, neighbour, direction, target, assignment, by_rank, log)
                if problem:
                    return f"rank {rank_plan.rank} cannot replay stage {stage}: {problem}"
    return ""


def _own_streams_unusable(stage: int, assignment: Assignment, log: Mapping[str, StreamSummary]) -> str:
    owners = assignment.holders(stage)
    if len(owners) != 1:
        return f"stage {stage} runs on ranks {', '.join(map(str, owners))}: replicas are not replayed"
    for kind in "FBXT":
        summary = log.get(f"s{stage}.{kind}")
        if summary is not None and summary.corrupt:
            return _corrupt(summary)
    return ""


def _input_unusable(
    reader: RankPlan,
    neighbour: int,
    direction: str,
    target: int,
    assignment: Assignment,
    by_rank: Mapping[int, RankPlan],
    log: Mapping[str, StreamSummary],
) -> str:
    owners = assignment.holders(neighbour)
    if len(owners) != 1:
        return f"stage {neighbour} runs on {len(owners)} ranks"
    writer = by_rank[owners[0]]
    stream = f"s{neighbour}.{direction}"
    summary = log.get(stream) or StreamSummary(stream=stream, records=0)
    if summary.corrupt:
        return _corrupt(summary)
    first = reader.from_version
    # Up to where the log alone must have it; what comes after is generated again by its writer (which may be
    # the reader itself: stages of one rank hand over inside it, and begin again together).
    until = min(target, writer.from_version)
    if until <= first:
        return ""
    return _lacks(summary, first, until - 1)


def _lacks(summary: StreamSummary, first: int, last: int) -> str:
    """Which of the steps `first` to `last` the stream does not reach; "" if it spans them."""
    if summary.trimmed_below_step > first:
        return (
            f"{summary.stream} is trimmed below step {summary.trimmed_below_step}, and step {first} is needed"
        )
    if summary.records == 0:
        return f"{summary.stream} is empty, and step {first} is needed"
    if summary.first_step > first:
        return f"{summary.stream} begins at step {summary.first_step}, and step {first} is needed"
    if summary.last_step < last:
        return f"{summary.stream} ends at step {summary.last_step}, and step {last} is needed"
    return ""


def _collective_source(
    ranks: Sequence[RankPlan], target: int, reports: Sequence[Report], log: Mapping[str, StreamSummary]
) -> tuple[int, str]:
    """(rank, "") or (-1, "" if none is needed, else why none will do)."""
    starts = [r.from_version for r in ranks if r.strategy in REPLAYS and r.from_version < target]
    streams = {r.rank: log.get(f"r{r.rank}.C") for r in ranks}
    if not starts or not any(summary and summary.records for summary in streams.values()):
        return -1, ""
    since = {report.rank: report.since_generation for report in reports}
    why = []
    for rank_plan in sorted(ranks, key=lambda r: (since[r.rank], r.rank)):
        summary = streams[rank_plan.rank]
        if rank_plan.strategy is not Strategy.KEEP or summary is None:
            continue
        problem = _corrupt(summary) if summary.corrupt else _lacks(summary, min(starts), target - 1)
        if not problem:
            return rank_plan.rank, ""
        why.append(problem)
    wanted = f"no survivor's log has the collective results of steps {min(starts)} to {target - 1}"
    return -1, f"{wanted} ({'; '.join(why) or 'none was logged'})"


def _corrupt(summary: StreamSummary) -> str:
    return f"{summary.stream} is corrupt" + (f" ({summary.reason})" if summary.reason else "")


def _summary(ranks: Sequence[RankPlan], target: int) -> str:
    parts = []
    for strategy in Strategy:
        chosen = [str(r.rank) for r in ranks if r.strategy is strategy]
        if chosen:
            noun = "rank" if len(chosen) == 1 else "ranks"
            parts.append(f"{strategy} on {noun} {', '.join(chosen)}")
    return f"target version {target}: {'; '.join(parts)}"
