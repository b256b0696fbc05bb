"""Builds a plan as one document and as text. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_ft.lab.plan.interval import Pace
from swift_ft.lab.plan.model import CostModel, Cuts, Floats
from swift_ft.lab.plan.profile import Cap, Profile
from swift_ft.text import size_words, table, time_words

# The exact frontier: all choices of groups of which no other has both fewer bytes and a shorter expected recovery.
#
# Groups are ranges of machines and both costs are sums over groups. So of the choices for the machines before j only
# the sums matter later: a dynamic program over (j, bytes). There are two, with the same result:
#
# grid    sizes are multiples of a unit g, as with equal boundaries: best[u, j] is the least expected recovery of the
#         machines before j with u units logged. O(n^2 U) time and O(n U) memory for n machines and U units, the most
#         that still shorten recovery: at most n^3 / 6 additions and comparisons for boundaries of one size
# labels  any sizes: for each j the undominated pairs (bytes, recovery). O(C log C) time for C candidates, whose number
#         may double with every machine. Above CANDIDATES_MAX, sizes are rounded up to a grid, and the result says so.
#         Then for every choice with k boundaries, bytes b and recovery r the result has one with at most b + k g bytes
#         and at most r
#
# A point must be better than the previous one by more than the relative IMPROVEMENT; less is rounding error of a sum.

CANDIDATES_MAX = 2_000_000
GRID_WORK = 250_000_000
GRID_UNITS_PER_MACHINE, GRID_UNITS_MAX = 2, 16_384
"""Limits of a grid's units. Between them GRID_WORK decides."""
IMPROVEMENT = 1e-12
_BLOCK = 64

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Point:
    edge_bytes: int
    """Bytes per step of the logged boundaries."""
    recovery_s: float
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class Frontier:
    """Undominated choices, ascending in bytes, descending in recovery time."""

    points: tuple[Point, ...]
    resolution_bytes: int
    """0: exact. Else the unit, in bytes per step, to which each boundary's size was rounded up."""


def exact(model: CostModel, *, worst_s: float = math.inf, candidates_max: int = CANDIDATES_MAX) -> Frontier:
    """Returns the frontier of all choices in which no group takes longer than `worst_s`; without points if there is
    none."""
    cost = np.where(model.recovery_s <= worst_s, model.expected_s, np.inf)
    sizes = model.edge_bytes[: model.n].copy()  # sizes[0] = 0: no boundary before machine 0
    quickest = shortest(cost)
    if quickest is None:
        return Frontier(points=(), resolution_bytes=0)
    most = int(sizes[list(quickest)].sum())  # more bytes do not shorten recovery
    unit = int(np.gcd.reduce(sizes)) or 1
    least, allowed = GRID_UNITS_PER_MACHINE * model.n, GRID_WORK // model.n**2
    units_max = max(least, min(allowed, GRID_UNITS_MAX))
    resolution = 0
    if most // unit <= units_max:
        frontier = on_grid(cost, sizes // unit, most // unit)
    elif (found := by_labels(cost, sizes, candidates_max)) is not None:
        frontier = found
    else:
        # Rounding up adds less than a unit per boundary, so the rounded sizes fit into units_max.
        resolution = -(-most // (units_max - model.n))
        frontier = on_grid(cost, -(-sizes // resolution), units_max)
    points = _undominated(_point(model, cuts) for cuts in [*frontier, quickest])
    return Frontier(points=points, resolution_bytes=resolution)


def shortest(cost: Floats) -> Cuts | None:
    """Returns a choice with the least cost, regardless of its bytes; None if the cost of every choice is infinite."""
    n = len(cost)
    best = np.zeros(n + 1)
    begins = [0] * (n + 1)
    for j in range(1, n + 1):
        sums = best[:j] + cost[:j, j]
        begins[j] = int(sums.argmin())
        best[j] = sums[begins[j]]
    if not math.isfinite(best[n]):
        return None
    cuts, j = [], begins[n]
    while j > 0:
        cuts.append(j)
        j = begins[j]
    return tuple(reversed(cuts))


def _point(model: CostModel, cuts: Cuts) -> Point:
    size = int(model.edge_bytes[list(cuts)].sum())
    return Point(edge_bytes=size, recovery_s=model.expected_recovery_s(cuts), cuts=cuts)


def _undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.edge_bytes, p.recovery_s)):
        if not kept or point.recovery_s < kept[-1].recovery_s * (1 - IMPROVEMENT):
            kept.append(point)
    return tuple(kept)


def on_grid(cost: Floats, units: Ints, units_max: int) -> list[Cuts]:
    """Returns the choices with the least cost for each number of units, at most `units_max`, at which the cost falls.

    `units[i]`: units of the boundary before machine i, at least 1 for 0 < i < n. Row u of the table depends only on
    rows below u, so each row is one vector operation per block of columns.
    """
    n = len(units)
    columns = np.ascontiguousarray(cost.T)  # [j, i]
    reach = np.concatenate([[0, 0], np.cumsum(units[1:])])  # the units before machines 1 to j - 1
    best = np.full((min(int(reach[n]), units_max) + 1, n + 1), np.inf)
    begins = np.zeros(best.shape, dtype=np.int32)
    best[0] = columns[:, 0]
    machines = np.arange(n)
    buffer = np.empty((_BLOCK, n))
    for u in range(1, len(best)):
        first = int(np.searchsorted(reach, u))  # the fewest machines that can have so many units
        low = max(1, first - 1)
        rows = u - units
        before = np.where(rows >= 0, best[np.maximum(rows, 0), machines], np.inf)
        for j in range(first, n + 1, _BLOCK):
            end = min(j + _BLOCK, n + 1)
            sums = buffer[: end - j, : end - 1 - low]
            np.add(columns[j:end, low : end - 1], before[low : end - 1], out=sums)
            least = sums.argmin(axis=1)
            best[u, j:end] = sums[np.arange(end - j), least]
            begins[u, j:end] = least + low
    return _walks(begins, units, np.array(_falls(best[:, n])), n)


def _falls(values: Floats) -> list[int]:
    """Returns the indices at which a value is below all previous values."""
    lowest = np.minimum.accumulate(np.concatenate([[np.inf], values[:-1]]))
    return [int(index) for index in np.flatnonzero(values < lowest)]


def _walks(begins: NDArray[np.int32], units: Ints, ends: Ints, n: int) -> list[Cuts]:
    """Returns the cuts of the best choices with `ends` units. Traces all of them back at once, from machine n to the
    first."""
    taken = np.zeros((len(ends), n), dtype=np.int32)  # one choice per row, in reverse
    left, at, lengths = ends.copy(), np.full(len(ends), n), np.zeros(len(ends), dtype=np.int64)
    while len(under_way := np.flatnonzero(left)):
        at[under_way] = begins[left[under_way], at[under_way]]
        taken[under_way, lengths[under_way]] = at[under_way]
        lengths[under_way] += 1
        left[under_way] -= units[at[under_way]]
    return [tuple(row[:length][::-1].tolist()) for row, length in zip(taken, lengths, strict=True)]


def by_labels(cost: Floats, sizes: Ints, candidates_max: int) -> list[Cuts] | None:
    """Solves `on_grid` for arbitrary sizes; None above `candidates_max` in all, since such sizes may give a point for
    every choice of groups."""
    n = len(sizes)
    at: list[tuple[Ints, Floats]] = [(np.zeros(1, dtype=np.int64), np.zeros(1))]  # machine 0: no groups yet
    parents: list[tuple[Ints, Ints]] = [(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))]
    count = 0
    for j in range(1, n + 1):
        count += sum(len(at[i][0]) for i in range(j))
        if count > candidates_max:
            return None
        spent = np.concatenate([at[i][0] + sizes[i] for i in range(j)])
        taken = np.concatenate([at[i][1] + cost[i, j] for i in range(j)])
        begins = np.concatenate([np.full(len(at[i][0]), i) for i in range(j)])
        labels = np.concatenate([np.arange(len(at[i][0])) for i in range(j)])
        order = np.lexsort((taken, spent))
        chosen = order[_falls(taken[order])]
        at.append((spent[chosen], taken[chosen]))
        parents.append((begins[chosen], labels[chosen]))
    return [_climb(parents, n, label) for label in range(len(at[n][0]))]


def _climb(parents: list[tuple[Ints, Ints]], j: int, label: int) -> Cuts:
    cuts = []
    while j > 0:
        j, label = int(parents[j][0][label]), int(parents[j][1][label])
        cuts.append(j)
    return tuple(reversed(cuts[:-1]))


# Whether the log pays off, and the best checkpoint interval. docs/planning.md derives it.


def pace(model: CostModel, cuts: Cuts) -> Pace:
    profile, step_s = model.profile, model.step_s + model.overhead_s(cuts)
    # The interval's formula replays K / 2 steps on average, the model (K - 1) / 2: subtract the half step.
    down_s, replay_s = model.means(cuts, -0.5)
    save_s = profile.checkpoint_stall_s
    return Pace(
        step_s=step_s,
        save_s=model.save_s if save_s is None else save_s,
        down_s=max(0.0, down_s),
        ratio=replay_s / step_s,
        mtbf_s=model.mtbf_s,
        useful_step_s=model.step_s,
    )


def steps_max(model: CostModel, cuts: Cuts, cap: Cap | None) -> float:
    """Returns the longest interval, in steps, that keeps within the cap; below 1 if none does."""
    if cap is None:
        return math.inf
    if cap.kind == "storage_bytes":
        per_step = model.bytes_per_step(cuts)
        return cap.value // per_step if per_step else math.inf
    bounds = [model.means(cuts, 0.0)] if cap.kind == "recovery_s" else model.parts(cuts)
    # down + (K - 1) / 2 replay <= cap; an interval that meets it to the last bit is one.
    return min(math.floor(1 + 2 * (cap.value - down_s) / replay_s + 1e-9) for down_s, replay_s in bounds)


def option(model: CostModel, cuts: Cuts, cap: Cap | None) -> dict[str, Any] | None:
    """Returns these cuts at their best interval. None: no interval keeps within the cap.

    "limited_by_cap": whether more steps would be better but exceed the cap.
    """
    most = steps_max(model, cuts, cap)
    if most < 1:
        return None
    time = pace(model, cuts)
    steps = time.best_steps(most)
    return {
        "groups": len(cuts) + 1,
        "logged": [model.edges[cut] for cut in cuts],
        "steps": steps,
        "useful": time.useful(steps),
        "limited_by_cap": steps == most and steps < time.best_steps(),
    }


def intervals(model: CostModel, chosen: Cuts, choices: Iterable[Cuts], cap: Cap | None) -> dict[str, Any]:
    """Returns the best interval with the chosen groups, without a log, and with the best of `choices`.

    `choices` are optimal for the profile's own interval; their numbers of copies are kept.
    """
    options = [option(model, cuts, cap) for cuts in ((), chosen, *choices)]
    # Of equal shares the first one: without a log, if that is as good.
    best = max((each for each in options if each is not None), key=lambda each: each["useful"], default=None)
    with_log, without = pace(model, chosen), pace(model, ())
    now = model.profile.checkpoint_interval_steps
    return {
        "save_s": with_log.save_s,
        "replay_ratio": with_log.ratio,
        "now": {
            "steps": now,
            "useful": with_log.useful(now),
            "useful_without_log": without.useful(now),
        },
        "chosen": options[1],
        "without_log": options[0],
        "best": best,
        "log_pays": best is not None and best["logged"] != [],
    }


FORMAT = 1
ROWS_MAX = 24
GROUPS_SHOWN = 16


def build(profile: Profile, cap: Cap | None) -> dict[str, Any]:
    """Builds the whole document."""
    model = CostModel(profile)
    curve, chosen, problem = choose(model, cap)
    groups = model.groups(chosen)
    down_s, replay_s = model.means(chosen, 0.0)
    return {
        "plan": FORMAT,
        "name": profile.name,
        "stages": profile.stages,
        "machines": profile.machines,
        "step_s": model.step_s,
        "mtbf_s": model.mtbf_s,
        "checkpoint_interval_steps": profile.checkpoint_interval_steps,
        "cap": None if cap is None else {cap.kind: cap.value},
        "met": not problem,
        "problem": problem,
        "chosen": {
            "groups": groups,
            **model.costs(chosen),
            "down_s": down_s,
            "replay_ratio": replay_s / model.step_s,
            "text": groups_text(groups),
        },
        "frontier": {
            "exact": curve.resolution_bytes == 0,
            "resolution_bytes": curve.resolution_bytes,
            "points": [{"groups": len(point.cuts) + 1, **model.costs(point.cuts)} for point in curve.points],
        },
        "interval": intervals(model, chosen, [point.cuts for point in curve.points], cap),
    }


def groups_text(groups: Sequence[dict[str, Any]]) -> str:
    """Formats the stages of each group as `Session.from_env(groups=...)` reads them."""
    ends = [(first, end - 1) for first, end in (group["stages"] for group in groups)]
    return ",".join(f"{first}" if last == first else f"{first}-{last}" for first, last in ends)


def choose(model: CostModel, cap: Cap | None) -> tuple[Frontier, Cuts, str]:
    """Returns (frontier, groups, problem): an empty problem, or why the cap cannot be met, with the closest groups."""
    if cap is not None and cap.kind == "worst_recovery_s":
        within = exact(model, worst_s=cap.value)
        if within.points:
            return within, within.points[0].cuts, ""
        curve = exact(model)
        closest = min(curve.points, key=lambda point: model.worst_recovery_s(point.cuts))
        least = f"{model.worst_recovery_s(closest.cuts):.4g} s is the least that is found"
        return curve, closest.cuts, f"no groups recover from every failure within {cap.value:g} s; {least}"
    curve = exact(model)
    if cap is None:
        return curve, curve.points[-1].cuts, ""
    if cap.kind == "recovery_s":
        last = curve.points[-1]
        quick = [point.cuts for point in curve.points if point.recovery_s <= cap.value]
        problem = f"no groups recover within {cap.value:g} s on average; {last.recovery_s:.4g} s is the least"
        return (curve, quick[0], "") if quick else (curve, last.cuts, problem)
    profile = model.profile
    room = max(cap.value // profile.checkpoint_interval_steps - profile.other_bytes, 0)
    # A single group logs no bytes, so it is within any cap.
    return curve, [point.cuts for point in curve.points if point.edge_bytes <= room][-1], ""


# --- text ---


def text(document: dict[str, Any]) -> list[str]:
    return [
        f"{document['name']}: {document['stages']} stages on {document['machines']} machines, "
        f"{time_words(document['step_s'])} a step, a failure every {time_words(document['mtbf_s'])}",
        "",
        *_table(document),
        "",
        *_chosen(document),
        "",
        *_interval_words(document),
    ]


def _table(document: dict[str, Any]) -> list[str]:
    points, chosen = document["frontier"]["points"], document["chosen"]["logged"]
    rows = [["", "groups", "log", "overhead", "recovery", "at worst"]]
    for index in _selected(points, chosen):
        point = points[index]
        rows.append(
            [
                "*" if point["logged"] == chosen else "",
                str(point["groups"]),
                size_words(point["storage_bytes"]),
                f"{100 * point['overhead_s'] / document['step_s']:.2g} %",
                f"{point['recovery_s']:.4g} s",
                f"{point['worst_recovery_s']:.4g} s",
            ]
        )
    left_out = len(points) - (len(rows) - 1)
    exact = document["frontier"]["exact"]
    head = f"{len(points)} choices of recovery groups, of which none is better in bytes and in time"
    if not exact:
        head += (
            f" (not exact: sizes were rounded up to {size_words(document['frontier']['resolution_bytes'])})"
        )
    return [head, *table(rows, left=0), *([f"({left_out} more; --json has all)"] if left_out else [])]


def _selected(points: Sequence[dict[str, Any]], chosen: list[int]) -> list[int]:
    if len(points) <= ROWS_MAX:
        return list(range(len(points)))
    spread = {round(at * (len(points) - 1) / (ROWS_MAX - 2)) for at in range(ROWS_MAX - 1)}
    return sorted(spread | {i for i, point in enumerate(points) if point["logged"] == chosen})


def _chosen(document: dict[str, Any]) -> list[str]:
    chosen, cap = document["chosen"], document["cap"]
    what = "without a cap: the shortest recovery"
    if cap is not None:
        ((kind, value),) = cap.items()
        amount = size_words(value) if kind == "storage_bytes" else time_words(value)
        what = {
            "storage_bytes": f"within {amount}: the shortest recovery",
            "recovery_s": f"back within {amount} on average: the fewest bytes",
            "worst_recovery_s": f"back within {amount} whoever fails: the fewest bytes",
        }[kind]
    lines = [
        what,
        f"  log {size_words(chosen['storage_bytes'])} until the next checkpoint, "
        f"{size_words(chosen['bytes_per_step'])} a step; overhead {time_words(chosen['overhead_s'])} a step",
        f"  recovery {time_words(chosen['recovery_s'])} on average, "
        f"{time_words(chosen['worst_recovery_s'])} at worst; "
        f"a replayed step takes {chosen['replay_ratio']:.2f} of a step",
    ]
    groups = chosen["groups"]
    for group in groups[:GROUPS_SHOWN]:
        (first, end), (begin, stop) = group["machines"], group["stages"]
        copies = f", {group['copies']} copies" if group["copies"] > 1 else ""
        lines.append(
            f"  {_run_words('machine', first, end)} ({_run_words('stage', begin, stop)}): "
            f"{time_words(group['recovery_s'])}{copies}"
        )
    if len(groups) > GROUPS_SHOWN:
        lines.append(f"  and {len(groups) - GROUPS_SHOWN} groups more")
    else:
        lines.append(f'  for the session: groups="{chosen["text"]}"')
    return lines


def _run_words(what: str, first: int, end: int) -> str:
    return f"{what} {first}" if end == first + 1 else f"{what}s {first} to {end - 1}"


def _interval_words(document: dict[str, Any]) -> list[str]:
    interval = document["interval"]
    verdict = "the log pays" if interval["log_pays"] else "the log does not pay"
    titles = (("best", "best of all"), ("chosen", "these groups"), ("without_log", "without a log"))
    lines = [f"{verdict}; the share of time that is training, at the best interval:"]
    for name, title in titles:
        option = interval[name]
        if option is None:
            lines.append(f"  {title}: no interval keeps to the cap")
            continue
        count = option["groups"]
        what = f"{count} groups" if count > 1 else "1 group"
        limited = " (no more within the cap)" if option["limited_by_cap"] else ""
        lines.append(
            f"  {title}: {_percent(option['useful'])}, {what}, a checkpoint every {option['steps']} steps{limited}"
        )
    now = interval["now"]
    lines.append(
        f"  as it is, every {now['steps']} steps: {_percent(now['useful'])}; "
        f"without a log {_percent(now['useful_without_log'])}"
    )
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.3f} %"
