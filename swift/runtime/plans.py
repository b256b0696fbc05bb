"""What one rank reads out of the coordinator's plan."""

from swift._pb import coordinator_pb2 as pb


def own_plan(plan: pb.Plan, rank: int) -> pb.RankPlan:
    return next(entry for entry in plan.ranks if entry.rank == rank)


def collective_sources(plan: pb.Plan) -> list[int]:
    """Ranks that have done all steps below the target themselves, the plan's choice first: a collective of some ranks
    is in the logs of those alone."""
    if plan.collective_source < 0:
        return []
    own_state = (pb.KEEP, pb.ROLL_FORWARD, pb.UNDO)
    others = [
        entry.rank
        for entry in plan.ranks
        if entry.strategy in own_state and entry.from_version == plan.target_version
    ]
    return [plan.collective_source, *others]


def gives_up_log(plan: pb.Plan) -> bool:
    """As the coordinator's planner decides (`swift.recovery.types.Plan.gives_up_log`)."""
    if all(entry.strategy == pb.CHECKPOINT for entry in plan.ranks):
        return True
    replays = any(entry.from_version < plan.target_version for entry in plan.ranks)
    return not (plan.exact or plan.saves or replays)
