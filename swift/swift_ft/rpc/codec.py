"""Conversions of coordinator messages: plans, measurements, and JSON for programs.

In the JSON, numbers are numbers and every field is present. protobuf's own JSON omits fields that are zero and writes
64-bit integers as strings.
"""

import math
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import ServiceError
from swift_ft.planner import Plan, RankPlan, Strategy

CALLS: Mapping[str, str] = {
    method.input_type.name: method.name for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods
}
"""Name of each request -> the call that takes it."""

# A plan on its way from the coordinator to the ranks.
#
# (coordinator) ``encoded`` → `View.plan` → (rank) ``of_view``, once, when it enters the plan's generation. The
# coordinator reads its stored plan in the same way.


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPlan:
    """A plan that the ranks of a generation carry out."""

    generation: int
    plan: Plan
    sources: Mapping[str, tuple[str, ...]]
    """Stream -> the log servers to read it from, the best first. Empty: the plan does not read the log."""


def encoded(plan: Plan, generation: int, sources: Mapping[str, Sequence[str]]) -> pb.Plan:
    """Returns the message for a plan. `sources`: the log servers to read each stream from. Inverse: `decoded`."""
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
        help=plan.help,
        predictions=plan.predictions,
    )


def decoded(message: pb.Plan) -> PublishedPlan:
    """Returns the plan of a message. Raises ServiceError if it names an unknown strategy: the coordinator is newer."""
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
        help=tuple(message.help),
        predictions=tuple(message.predictions),
    )
    sources = {entry.stream: tuple(entry.servers) for entry in message.sources}
    return PublishedPlan(generation=message.generation, plan=plan, sources=sources)


def of_view(view: pb.View) -> PublishedPlan | None:
    """Returns the plan of the View's generation, or None if there is none. Raises ServiceError as `decoded`."""
    return decoded(view.plan) if view.HasField("plan") else None


def _strategy(number: int) -> Strategy:
    known = pb.Strategy.DESCRIPTOR.values_by_number.get(number)
    if known is None or known.name not in Strategy.__members__:
        raise ServiceError(
            f"the plan has a strategy of number {number}, which is not known here: the coordinator is of another "
            "version; install the same swift-ft everywhere"
        )
    return Strategy[known.name]


_STAGES_MAX, _DESTINATIONS_MAX = 64, 16
"""Limits of stages that one rank runs, and of those that one stage sends to."""


def check_measured(measured: pb.RankMeasured) -> None:
    """Raises ValueError if a value of a rank's measurements is out of its range."""
    if measured.steps < 1:
        raise ValueError("steps is 0: nothing was measured")
    if len(measured.stages) > _STAGES_MAX:
        raise ValueError(f"{len(measured.stages)} stages: a rank runs at most {_STAGES_MAX}")
    indices = [stage.stage for stage in measured.stages]
    if indices != sorted(set(indices)):
        raise ValueError(f"stages must ascend: {indices}")
    for stage in measured.stages:
        if len(stage.sent) > _DESTINATIONS_MAX:
            raise ValueError(
                f"stage {stage.stage} sends to {len(stage.sent)} stages: at most {_DESTINATIONS_MAX}"
            )
        if len({sent.destination for sent in stage.sent}) < len(stage.sent):
            raise ValueError(f"stage {stage.stage} names a destination twice")
    for message in (measured, *measured.stages, *(sent for stage in measured.stages for sent in stage.sent)):
        for field, value in message.ListFields():
            most = _most(field.name)
            if type(value) in (int, float) and not 0 <= value <= most:
                raise ValueError(f"{field.name} is {value}: must be from 0 to {most:g}")


def _most(name: str) -> float:
    if name in ("stage", "destination"):
        return 1 << 20
    if name.endswith("_per_s"):
        return 1e18
    return 1e9 if name.endswith("_s") else 1 << 62


def optional(message: Message, name: str) -> Any:
    """Returns the value of an optional field; None if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def as_json(message: Message) -> dict[str, Any]:
    """Returns a dict by field names as in the .proto. Enums are names (numbers if only a newer service knows them), map
    keys are strings. None stands for an unset optional field and for a number that is not finite."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    of = field.message_type
    if of is not None and of.GetOptions().map_entry:
        to = of.fields_by_name["value"]
        return {str(key): _value(value[key], to) for key in sorted(value)}
    if isinstance(value, MutableSequence):
        return [_value(item, field) for item in value]
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value if not isinstance(value, float) or math.isfinite(value) else None
