"""Can the log feed the replays of a plan?

Replaying stage k for data-parallel rank d over the steps [a, t) reads `s{k-1}.F` and `s{k+1}.B` of that rank
(swift.log.streams has the names), and compares what it sends with its own F and B. A neighbour that replays from b
generates its stream again from step b, so the log must have the rest, [a, b), only; a neighbour that does not replay
must have logged all of [a, t). External inputs (X, T) come out of the trainer's own loader again where the log has a
hole, so they only must not be corrupt. No stream that is read or written may have a step in [a, t) that was declared
unlogged (swift.log.unlogged): nothing that is missing is guessed at, nor filled in behind what came after it. The
stages of a recovery group (swift.recovery.groups) replay from one version, so of what passes between them, which is not
logged at all, nothing is asked for here. Collective results come from one rank that has done all the steps before t.

Whether each single record is there is not known here; a rank that finds one missing refuses.
"""

from collections.abc import Iterable, Mapping, Sequence

from swift.log import streams
from swift.recovery.assignment import Assignment
from swift.recovery.decision import RankPlan
from swift.recovery.types import Report, StreamSummary


def uncovered(
    ranks: Iterable[RankPlan], target: int, assignment: Assignment, log: Mapping[str, StreamSummary]
) -> str:
    """Why the log cannot feed the replays; "" if it can."""
    by_rank = {rank_plan.rank: rank_plan for rank_plan in ranks}
    for reader in by_rank.values():
        if reader.from_version == target:
            continue
        dp_rank, dp_size = assignment.slots[reader.rank].dp_rank, assignment.dp_size
        for stage in assignment.stages[reader.rank]:
            for kind in streams.KINDS:
                own = log.get(streams.boundary(stage, kind, dp_rank, dp_size))
                if own is not None and own.corrupt:
                    return _corrupt(own)
                problem = "" if own is None else _unlogged(own, reader.from_version, target - 1)
                if problem:
                    return f"rank {reader.rank} cannot replay stage {stage}: {problem}"
            for neighbour, kind in ((stage - 1, "F"), (stage + 1, "B")):
                if not 0 <= neighbour < assignment.num_stages:
                    continue
                writer = by_rank[assignment.slot_at(neighbour, dp_rank)]
                stream = streams.boundary(neighbour, kind, dp_rank, dp_size)
                problem = _input_unusable(reader, writer, stream, target, log)
                if problem:
                    return f"rank {reader.rank} cannot replay stage {stage}: {problem}"
    return ""


def _input_unusable(
    reader: RankPlan, writer: RankPlan, stream: str, target: int, log: Mapping[str, StreamSummary]
) -> str:
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
    """Which of the steps `first` to `last` the stream does not have; "" if it spans them."""
    if problem := _unlogged(summary, first, last):
        return problem
    if summary.trimmed_below_step > first:
        return (
            f"{summary.stream} is trimmed below step {summary.trimmed_below_step}, and step {first} is needed"
        )
    if summary.records == 0:
        return f"{summary.stream} is empty, and step {first} is needed{_why(summary)}"
    if summary.first_step > first:
        return (
            f"{summary.stream} begins at step {summary.first_step}, and step {first} is needed{_why(summary)}"
        )
    if summary.last_step < last:
        return f"{summary.stream} ends at step {summary.last_step}, and step {last} is needed"
    return ""


def _unlogged(summary: StreamSummary, first: int, last: int) -> str:
    """Which of the steps `first` to `last` are declared not to be whole."""
    if summary.unlogged is None or summary.unlogged[0] > last or summary.unlogged[1] < first:
        return ""
    begin, end = summary.unlogged
    steps = f"step {begin}" if begin == end else f"steps {begin} to {end}"
    return (
        f"records of {summary.stream} in {steps} are declared unlogged: dropped, as the log could not keep up, or "
        "lost with a process that a replica has replaced"
    )


def collective_source(
    ranks: Sequence[RankPlan], target: int, reports: Iterable[Report], log: Mapping[str, StreamSummary]
) -> tuple[int, str]:
    """(rank, "") or (-1, "" if none is needed, else why none will do).

    Any rank that has done the steps before `target` itself may be the source, since results are equal on all;
    one that keeps its state comes first. (A stage that is rebuilt from the checkpoint although one of its ranks
    holds the target, because another one does not, may leave nobody who keeps.)
    """
    starts = [r.from_version for r in ranks if r.from_version < target]
    logged = {r.rank: log.get(streams.collectives(r.rank)) for r in ranks}
    # A stream that nobody ever writes may be declared all the same, by who cannot tell.
    if not starts or not any(summary and summary.records > summary.marks for summary in logged.values()):
        return -1, ""
    by_rank = {report.rank: report for report in reports}
    keeps = {r.rank for r in ranks if r.policy.rests}
    why = []
    for rank, summary in sorted(
        logged.items(), key=lambda item: (item[0] not in keeps, by_rank[item[0]].since_generation, item[0])
    ):
        newest = by_rank[rank].newest
        if newest is None or newest < target or summary is None:
            continue
        problem = _corrupt(summary) if summary.corrupt else _lacks(summary, min(starts), target - 1)
        if not problem:
            return rank, ""
        why.append(problem)
    wanted = f"no survivor's log has the collective results of steps {min(starts)} to {target - 1}"
    return -1, f"{wanted} ({'; '.join(why) or 'none was logged'})"


def _corrupt(summary: StreamSummary) -> str:
    return f"{summary.stream} is corrupt{_why(summary)}"


def _why(summary: StreamSummary) -> str:
    return f" ({summary.reason})" if summary.reason else ""
