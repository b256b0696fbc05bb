"""Conversions of coordinator messages: plans, measurements, and JSON for programs.

In the JSON, numbers are numbers and every field is present. protobuf's own JSON omits fields that are zero and writes
64-bit integers as strings.
"""

import math
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.message import Message

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import ServiceError
from swift_ft.planner import Help, Plan, Prediction, RankMeasured, RankPlan, Sent, StageMeasured, Strategy

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
        help=[pb.Help(**asdict(one)) for one in plan.help],
        predictions=[pb.ReplayPrediction(**asdict(one)) for one in plan.predictions],
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
        help=tuple(Help(**_fields(one)) for one in message.help),
        predictions=tuple(Prediction(**_fields(one)) for one in message.predictions),
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


# Measurements of ranks, as messages: (rank) `to_message` → coordinator → (anyone) `from_message`.


def to_message(measured: RankMeasured) -> pb.RankMeasured:
    """Returns the message for one rank's measurements. `from_message` is its inverse."""
    return pb.RankMeasured(**asdict(measured))


def from_message(message: pb.RankMeasured) -> RankMeasured:
    """Returns the measurements of a message. Raises ValueError if a value is out of its range."""
    stages = tuple(
        StageMeasured(**{**_fields(stage), "sent": tuple(Sent(**_fields(sent)) for sent in stage.sent)})
        for stage in message.stages
    )
    return RankMeasured(**{**_fields(message), "stages": stages})


# Fields of messages, by name.


def _fields(message: Message) -> dict[str, Any]:
    """Returns the fields of a message for the dataclass with equal names: tuples, and no optional field that is not
    set."""
    found = {
        part: getattr(message, part.name)
        for part in message.DESCRIPTOR.fields
        if not part.has_presence or message.HasField(part.name)
    }
    return {
        part.name: tuple(value) if isinstance(value, MutableSequence) else value
        for part, value in found.items()
    }


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
