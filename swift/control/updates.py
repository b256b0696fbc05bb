"""From a View to the next one: what changes on the way, and the View that comes of it.

A job of n ranks has a View of n members, and n ranks watch it: told whole each time, a recovery would move n * n.

    (coordinator)  whole(view), between(old, new)   what a watcher is told that knows none, or `old`
    (watcher)      applied(update, old)             the new View
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from swift._pb import coordinator_pb2 as pb

_BY_RANK = ("members", "log_copies")
_APPENDED = ("fenced", "log_servers", "log_places", "runs")
_LONG: tuple[Any, ...] = (*_BY_RANK, *_APPENDED, "groups_from", "plan")
_NUMBERS = {name: pb.View.DESCRIPTOR.fields_by_name[name].number for name in _LONG}
RANKS_MAX = 1 << 16


def whole(view: pb.View, *, reads_log: bool = True) -> pb.ViewUpdate:
    """For whoever knows none."""
    update = pb.ViewUpdate(view=view)
    _fold_plan(update, reads_log=reads_log)
    return update


def between(old: pb.View, new: pb.View, *, reads_log: bool = True) -> pb.ViewUpdate:
    """For whoever knows `old`. `reads_log`: the plan's `sources` are told as well."""
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
    if dict(old.groups_from) != dict(new.groups_from):
        _replace(update, "groups_from", new)
    if (old.HasField("plan"), old.plan) != (new.HasField("plan"), new.plan):
        _replace(update, "plan", new)
    _fold_plan(update, reads_log=reads_log)
    return update


def applied(update: pb.ViewUpdate, old: pb.View | None) -> pb.View | None:
    """None: it changes another View than `old`, or is no update, and nothing can be made of it."""
    counts = [count for together in update.planned for count in together.ranges[1::2]]
    if any(len(together.ranges) % 2 for together in update.planned) or sum(map(abs, counts)) > RANKS_MAX:
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
        elif name == "groups_from":
            view.groups_from.update(old.groups_from)
        elif name in _BY_RANK:
            before, news = getattr(old, name), getattr(update.view, name)
            gone = update.gone if name == "members" else ()
            getattr(view, name).extend(_merged(before, news, gone) if news or gone else before)
        else:
            getattr(view, name).extend([*getattr(old, name), *getattr(update.view, name)])
    return view


def _short(view: pb.View) -> pb.View:
    """Without its long fields."""
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
    elif name == "groups_from":
        update.view.groups_from.update(new.groups_from)
    else:
        getattr(update.view, name).extend(getattr(new, name))


def _merged(old: Iterable[pb.Member], new: Iterable[pb.Member], gone: Sequence[int]) -> list[pb.Member]:
    by_rank = {entry.rank: entry for entry in old} | {entry.rank: entry for entry in new}
    return [by_rank[rank] for rank in sorted(by_rank.keys() - set(gone))]


def _fold_plan(update: pb.ViewUpdate, *, reads_log: bool) -> None:
    """Ranks of which it says the same are told of together."""
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
