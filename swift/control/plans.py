"""A plan on its way from the coordinator to the ranks.

(coordinator) ``encoded`` → `View.plan` → (rank) ``of_view``, once, where it enters the plan's generation: nobody else
reads the message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift._pb import coordinator_pb2 as pb
from swift.errors import ServiceError
from swift.recovery import Help, Plan, Prediction, RankPlan, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPlan:
    """What the ranks of a generation carry out."""

    generation: int
    plan: Plan
    sources: Mapping[str, tuple[str, ...]]
    """Stream -> the log servers to read it from, the best first; empty: nothing of the log is read."""


def encoded(plan: Plan, generation: int, sources: Mapping[str, Sequence[str]]) -> pb.Plan:
    """The message for a plan; `sources`: for each stream the log servers to read it from. Inverse: `decoded`."""
    return pb.Plan(
        generation=generation,
        target_version=plan.target_version,
        ranks=[
            pb.RankPlan(
                rank=r.rank,
                strategy=pb.Strategy.Value(r.strategy),
                from_version=r.from_version,
                reason=r.reason,
                sources=r.sources,
            )
            for r in plan.ranks
        ],
        collective_source=plan.collective_source,
        reason=plan.reason,
        exact=plan.exact,
        sources=[
            pb.StreamSources(stream=stream, servers=servers) for stream, servers in sorted(sources.items())
        ],
        groups=plan.groups,
        help=[
            pb.Help(owner=h.owner, helpers=h.helpers, until=h.until, together=h.together) for h in plan.help
        ],
        saves=plan.saves,
        predictions=[
            pb.ReplayPrediction(
                rank=prediction.rank,
                workers=prediction.workers,
                steps=prediction.steps,
                seconds=prediction.seconds,
                alone_s=prediction.alone_s,
            )
            for prediction in plan.predictions
        ],
    )


def decoded(message: pb.Plan) -> PublishedPlan:
    """Raises ServiceError if it names a strategy that this process does not know: its coordinator is a newer one."""
    plan = Plan(
        target_version=message.target_version,
        ranks=tuple(
            RankPlan(
                rank=r.rank,
                strategy=_strategy(r.strategy),
                from_version=r.from_version,
                reason=r.reason,
                sources=tuple(r.sources),
            )
            for r in message.ranks
        ),
        collective_source=message.collective_source,
        reason=message.reason,
        exact=message.exact,
        help=tuple(
            Help(owner=h.owner, helpers=tuple(h.helpers), until=h.until, together=tuple(h.together))
            for h in message.help
        ),
        saves=message.saves,
        predictions=tuple(
            Prediction(
                rank=prediction.rank,
                workers=prediction.workers,
                steps=prediction.steps,
                seconds=prediction.seconds,
                alone_s=prediction.alone_s,
            )
            for prediction in message.predictions
        ),
        groups=message.groups,
    )
    sources = {entry.stream: tuple(entry.servers) for entry in message.sources}
    return PublishedPlan(generation=message.generation, plan=plan, sources=sources)


def of_view(view: pb.View) -> PublishedPlan | None:
    """The plan of its generation; None: there is none. Raises ServiceError as `decoded`."""
    return decoded(view.plan) if view.HasField("plan") else None


def _strategy(number: int) -> Strategy:
    known = pb.Strategy.DESCRIPTOR.values_by_number.get(number)
    if known is None or known.name not in Strategy.__members__:
        raise ServiceError(
            f"the plan has a strategy of number {number}, which is not known here: the coordinator is of another "
            "version; install the same swift-ft everywhere"
        )
    return Strategy[known.name]
