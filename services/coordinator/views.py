"""From a row to the messages that show it."""

from services.coordinator.core import Job
from services.coordinator.row import Holder, JobRow, State
from services.coordinator.words import waiting_for
from swift._pb import coordinator_pb2 as pb
from swift.recovery import Plan


def view_of(row: JobRow) -> pb.View:
    shows_plan = row.state in (State.RECOVERING, State.RUNNING) and row.plan is not None
    return pb.View(
        job=row.job,
        generation=row.generation,
        state=pb.State.Value(row.state),
        world_size=row.world_size,
        members=[_member(row.holders[rank]) for rank in sorted(row.holders)],
        fenced=[_member(holder) for holder in row.fenced],
        plan=_plan(row.plan, row.generation) if shows_plan and row.plan is not None else None,
        log_servers=row.log_servers,
        reason=row.reason,
        revision=row.revision,
        checkpoints=row.checkpoints,
        waiting_for=waiting_for(row),
        checkpoint_at=row.checkpoint_at,
        checkpoint_reason=row.checkpoint_reason,
    )


def status_of(job: Job, now: float) -> pb.StatusReply:
    ranks = [
        pb.RankStatus(
            rank=rank,
            version=job.steps.version(rank),
            lease_age_s=job.lease_age_s(rank, now),
            stages=job.row.stages.get(rank, []),
        )
        for rank in sorted(job.row.holders)
    ]
    suspicions = [
        pb.Suspicion(rank=rank, reason=reason, age_s=age_s) for rank, reason, age_s in job.suspicions(now)
    ]
    return pb.StatusReply(view=view_of(job.row), ranks=ranks, suspicions=suspicions)


def _member(holder: Holder) -> pb.Member:
    return pb.Member(rank=holder.rank, incarnation=holder.incarnation, pid=holder.pid, host=holder.host)


def _plan(plan: Plan, generation: int) -> pb.Plan:
    ranks = [
        pb.RankPlan(
            rank=r.rank,
            strategy=pb.Strategy.Value(r.strategy),
            from_version=r.from_version,
            reason=r.reason,
            sources=r.sources,
        )
        for r in plan.ranks
    ]
    return pb.Plan(
        generation=generation,
        target_version=plan.target_version,
        ranks=ranks,
        collective_source=plan.collective_source,
        reason=plan.reason,
        exact=plan.exact,
    )
