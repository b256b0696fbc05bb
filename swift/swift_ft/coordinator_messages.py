"""The coordinator's messages: plans, measurements, Views and their differences; as JSON, and as text for people.

In the JSON, numbers are numbers and every field is present. protobuf's own JSON omits fields that are zero and writes
64-bit integers as strings.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import ServiceError
from swift_ft.planner import Plan, RankPlan, Strategy
from swift_ft.text import WORLD_SIZE_MAX, listed

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


# A View as human-readable text, for `swift-ft status` and the launcher's lines.

OVER = (pb.FINISHED, pb.FAILED, pb.STOPPED)
"""States in which a job's ranks and log servers are no longer monitored."""
STARTED_AGAIN = "started again"
"""First words of the `reason` of a job that was over and has been started again."""
ADOPTED = "adopted"
"""First word of the `reason` of a job that begins with its own checkpoints, which its coordinator did not know."""


def state_name(state: int) -> str:
    """Returns the state's name; `STATE_<number>` for a state that only a newer coordinator knows."""
    return pb.State.Name(state) if state in pb.State.values() else f"STATE_{state}"  # type: ignore[arg-type]


def has_left_forming(view: pb.View | None) -> bool:
    """Returns whether the job has left FORMING and has neither failed nor been stopped; False if no View is known."""
    return view is not None and view.state not in (pb.FORMING, pb.FAILED, pb.STOPPED)


def inexact_words(view: pb.View) -> str:
    """Returns since when and why the job is not exact; empty if it equals a run without failures bit for bit."""
    if not view.HasField("inexact_since"):
        return ""
    return f"not exact since version {view.inexact_since}: {view.inexact_reason}"


def rehearsal_words(view: pb.View) -> list[str]:
    """Returns one line per rank that records steps for rehearsals; ranks with equal lines share one."""
    told: dict[tuple[str, str], list[int]] = {}
    for known in view.rehearsals:
        came = f" at version {known.version}, {known.steps} step{'s' * (known.steps != 1)}, "
        told_before = known.difference and known.difference in view.inexact_reason
        came += "equal" if not known.difference else "different"
        came += f": {known.difference}" if known.difference and not told_before else ""
        before, behind = ("rehearsed", came) if known.done else ("not rehearsed", "")
        if known.why_not:
            behind += f" (the last attempt could not be done: {known.why_not})"
        if known.HasField("under_way"):
            behind += f" (one is under way, from version {known.under_way})"
        told.setdefault((before, behind), []).append(known.rank)
    if not told:
        return ["not rehearsed"]
    return [
        f"{before}: rank{'s' * (len(ranks) > 1)} {listed(ranks)}{behind}"
        for (before, behind), ranks in told.items()
    ]


def end_words(view: pb.View) -> list[str]:
    """Returns lines to print when a run ends. Empty if it has done all of its steps, exactly."""
    words = []
    if view.state == pb.FINISHED and view.reason:  # the trainer ended the job before all steps
        words.append(f"{view.reason}; with more than {view.ends_of} steps it goes on")
    rehearsed = rehearsal_words(view) if view.rehearsals else []
    return [*words, *filter(None, [inexact_words(view)]), *rehearsed]


# Updates: the difference between two Views, and the View that results from applying it.
#
# A job of n ranks has a View of n members, and n ranks watch it: sending whole Views would move n * n in a recovery.
#
#     (coordinator)  whole(view), between(old, new)   update for a watcher that has no View, or `old`
#     (watcher)      applied(update, old)             the new View

_BY_RANK = ("members", "log_copies", "rehearsals")
_APPENDED = ("fenced", "log_servers", "log_places", "runs")
_LONG: tuple[Any, ...] = (*_BY_RANK, *_APPENDED, "plan")
_NUMBERS = {name: pb.View.DESCRIPTOR.fields_by_name[name].number for name in _LONG}


def whole(view: pb.View, *, reads_log: bool = True) -> pb.ViewUpdate:
    """Returns the update for a watcher that has no View. `reads_log`: keeps the plan's `sources`."""
    update = pb.ViewUpdate(view=view)
    _fold_plan(update, reads_log=reads_log)
    return update


def between(old: pb.View, new: pb.View, *, reads_log: bool = True) -> pb.ViewUpdate:
    """Returns the update for a watcher that has `old`. `reads_log`: keeps the plan's `sources`."""
    update = pb.ViewUpdate(base=old.revision, view=_short(new))
    view = update.view
    for name in _BY_RANK:
        before = {entry.rank: entry for entry in getattr(old, name)}
        after = {entry.rank: entry for entry in getattr(new, name)}
        getattr(view, name).extend(entry for rank, entry in after.items() if before.get(rank) != entry)
        gone = before.keys() - after.keys()
        if name == "members":
            update.gone.extend(sorted(gone))
        elif gone:
            _replace(update, name, new)
    for name in _APPENDED:
        before, after = getattr(old, name), getattr(new, name)
        if list(after[: len(before)]) == list(before):
            getattr(view, name).extend(after[len(before) :])
        else:
            _replace(update, name, new)
    if (old.HasField("plan"), old.plan) != (new.HasField("plan"), new.plan):
        _replace(update, "plan", new)
    _fold_plan(update, reads_log=reads_log)
    return update


def applied(update: pb.ViewUpdate, old: pb.View | None) -> pb.View | None:
    """Applies an update. Returns None if its base is another View than `old`, or if it is malformed."""
    counts = [count for together in update.planned for count in together.ranges[1::2]]
    if any(len(together.ranges) % 2 for together in update.planned) or sum(map(abs, counts)) > WORLD_SIZE_MAX:
        return None
    view = pb.View()
    view.CopyFrom(update.view)
    if view.HasField("plan"):
        view.plan.ranks.extend(_unfolded(update.planned))
    if not update.base:
        return view
    if old is None or old.revision != update.base:
        return None
    for name in _LONG:
        if _NUMBERS[name] in update.replaced:
            continue
        view.ClearField(name)
        if name == "plan":
            if old.HasField("plan"):
                view.plan.CopyFrom(old.plan)
        elif name in _BY_RANK:
            before, news = getattr(old, name), getattr(update.view, name)
            gone = update.gone if name == "members" else ()
            getattr(view, name).extend(_merged(before, news, gone) if news or gone else before)
        else:
            getattr(view, name).extend([*getattr(old, name), *getattr(update.view, name)])
    return view


def _short(view: pb.View) -> pb.View:
    """Returns a copy of the View without its long fields."""
    short = pb.View()
    short.CopyFrom(view)
    for name in _LONG:
        short.ClearField(name)
    return short


def _replace(update: pb.ViewUpdate, name: Any, new: pb.View) -> None:
    update.replaced.append(_NUMBERS[name])
    update.view.ClearField(name)
    if name == "plan":
        if new.HasField("plan"):
            update.view.plan.CopyFrom(new.plan)
    else:
        getattr(update.view, name).extend(getattr(new, name))


def _merged(old: Iterable[pb.Member], new: Iterable[pb.Member], gone: Sequence[int]) -> list[pb.Member]:
    by_rank = {entry.rank: entry for entry in old} | {entry.rank: entry for entry in new}
    return [by_rank[rank] for rank in sorted(by_rank.keys() - set(gone))]


def _fold_plan(update: pb.ViewUpdate, *, reads_log: bool) -> None:
    """Groups the plan's ranks with equal entries into ranges. Without `reads_log`, removes the plan's `sources`."""
    if not update.view.HasField("plan"):
        return
    plan = update.view.plan
    alike: dict[bytes, list[int]] = {}
    unnumbered = pb.RankPlan()
    for entry in plan.ranks:
        unnumbered.CopyFrom(entry)
        unnumbered.rank = 0
        alike.setdefault(unnumbered.SerializeToString(deterministic=True), []).append(entry.rank)
    del plan.ranks[:]
    if not reads_log:
        del plan.sources[:]
    for data, ranks in alike.items():
        update.planned.append(pb.PlannedRanks(plan=pb.RankPlan.FromString(data), ranges=_ranges(ranks)))


def _ranges(ranks: Iterable[int]) -> list[int]:
    ranges: list[int] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-2] + ranges[-1]:
            ranges[-1] += 1
        else:
            ranges += [rank, 1]
    return ranges


def _unfolded(planned: Iterable[pb.PlannedRanks]) -> Iterator[pb.RankPlan]:
    entries = [
        (rank, together.plan)
        for together in planned
        for first, count in zip(together.ranges[::2], together.ranges[1::2], strict=True)
        for rank in range(first, first + count)
    ]
    for rank, plan in sorted(entries, key=lambda entry: entry[0]):
        own = pb.RankPlan()
        own.CopyFrom(plan)
        own.rank = rank
        yield own
