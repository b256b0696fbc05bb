"""What a plan says, as one document and as text. Pure."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_ft.lab.plan.interval import Pace, balance, daly_s, young_s
from swift_ft.lab.plan.model import CostModel, Cuts, Floats, Prediction
from swift_ft.lab.plan.profile import Cap, Profile

# Every choice of groups than which none has both fewer bytes and a shorter expected recovery: exact.
#
# Groups are runs of machines and both costs are sums over them, so choices for the machines before j matter to others
# by their sums alone: a dynamic program over (j, bytes). Two of them, for the same answer:
#
# grid    sizes are multiples of a unit g, as when all boundaries are alike: best[u, j], the least expected recovery of
#         the machines before j with u units logged. O(n^2 U) time for n machines and U units, those above which nothing
#         is gained any more: at most n^3 / 6 additions and comparisons for boundaries of one size. O(n U) memory
# labels  any sizes: at each j the pairs (bytes, recovery) of which none is better in both. O(C log C) time, C
# candidates,
#         whose number may double with every machine: above CANDIDATES_MAX sizes are rounded up to a grid, and the
#         result says so. Then for every choice with k boundaries, bytes b and recovery r it has one with at most b +
#         k g bytes and at most r
#
# A point must be better than the one before by more than IMPROVEMENT of it; less is the rounding of a sum.

CANDIDATES_MAX = 2_000_000
GRID_WORK = 250_000_000
GRID_UNITS_PER_MACHINE, GRID_UNITS_MAX = 2, 16_384
"""A grid has as many units as GRID_WORK allows, but not fewer nor more than these."""
IMPROVEMENT = 1e-12
_BLOCK = 64

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Point:
    edge_bytes: int
    """Of the logged boundaries, per step."""
    recovery_s: float
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class Frontier:
    """Ascending in bytes, descending in recovery time."""

    points: tuple[Point, ...]
    resolution_bytes: int
    """0: exact. Else bytes per step, to which each boundary's size was rounded up."""

    def within(self, edge_bytes: float) -> Point | None:
        """The shortest recovery with at most so many bytes per step; None: there is none."""
        fitting = [point for point in self.points if point.edge_bytes <= edge_bytes]
        return fitting[-1] if fitting else None

    def by(self, recovery_s: float) -> Point | None:
        """The fewest bytes with at most this expected recovery."""
        return next((point for point in self.points if point.recovery_s <= recovery_s), None)


class TooManyCandidates(Exception):
    """The frontier of arbitrary sizes may have a point for every choice of groups."""


def exact(model: CostModel, *, worst_s: float = math.inf, candidates_max: int = CANDIDATES_MAX) -> Frontier:
    """Of all choices in which no group takes longer than `worst_s`; without points if there is none."""
    cost = np.where(model.recovery_s <= worst_s, model.expected_s, np.inf)
    sizes = model.edge_bytes[: model.n].copy()  # sizes[0] = 0: nothing is in front of machine 0
    quickest = shortest(cost)
    if quickest is None:
        return Frontier(points=(), resolution_bytes=0)
    most = int(sizes[list(quickest)].sum())  # more bytes than these gain nothing
    unit = int(np.gcd.reduce(sizes)) or 1
    least, allowed = GRID_UNITS_PER_MACHINE * model.n, GRID_WORK // model.n**2
    units_max = max(least, min(allowed, GRID_UNITS_MAX))
    resolution = 0
    if most // unit <= units_max:
        frontier = on_grid(cost, sizes // unit, most // unit)
    else:
        try:
            frontier = by_labels(cost, sizes, candidates_max)
        except TooManyCandidates:
            # Rounding up adds less than a unit for each boundary: with these, the grid is as big as it may be.
            resolution = -(-most // (units_max - model.n))
            frontier = on_grid(cost, -(-sizes // resolution), units_max)
    return _made(model, [*frontier, quickest], resolution)


def joined(
    model: CostModel, frontier: Frontier, choices: Iterable[Cuts], *, worst_s: float = math.inf
) -> Frontier:
    """With what others have found: a frontier that is not exact may lack it."""
    allowed = [cuts for cuts in choices if model.worst_recovery_s(cuts) <= worst_s]
    return _made(model, [*(point.cuts for point in frontier.points), *allowed], frontier.resolution_bytes)


def _made(model: CostModel, choices: Iterable[Cuts], resolution: int) -> Frontier:
    return Frontier(points=_undominated(_point(model, cuts) for cuts in choices), resolution_bytes=resolution)


def shortest(cost: Floats) -> Cuts | None:
    """A choice with the least cost, whatever its bytes; None if every choice's is infinite."""
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
    """The choices with the least cost for each number of units, at most `units_max`, at which it falls.

    `units[i]`: at least 1 for 0 < i < n, of the boundary in front of machine i. Row u of the table needs rows below u
    only, so each is one vector operation over a block of columns.
    """
    n = len(units)
    columns = np.ascontiguousarray(cost.T)  # [j, i]
    reach = np.concatenate([[0, 0], np.cumsum(units[1:])])  # the units in front of machines 1 to j - 1
    best = np.full((min(int(reach[n]), units_max) + 1, n + 1), np.inf)
    begins = np.zeros(best.shape, dtype=np.int32)
    best[0] = columns[:, 0]
    machines = np.arange(n)
    buffer = np.empty((_BLOCK, n))
    for u in range(1, len(best)):
        first = int(np.searchsorted(reach, u))  # no fewer machines have so many units
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
    """Where a value is below all that come before it."""
    lowest = np.minimum.accumulate(np.concatenate([[np.inf], values[:-1]]))
    return [int(index) for index in np.flatnonzero(values < lowest)]


def _walks(begins: NDArray[np.int32], units: Ints, ends: Ints, n: int) -> list[Cuts]:
    """The cuts of the best choices with `ends` units, all walked back at once, from machine n to the first one."""
    taken = np.zeros((len(ends), n), dtype=np.int32)  # a choice in each row, from the end
    left, at, lengths = ends.copy(), np.full(len(ends), n), np.zeros(len(ends), dtype=np.int64)
    while len(under_way := np.flatnonzero(left)):
        at[under_way] = begins[left[under_way], at[under_way]]
        taken[under_way, lengths[under_way]] = at[under_way]
        lengths[under_way] += 1
        left[under_way] -= units[at[under_way]]
    return [tuple(row[:length][::-1].tolist()) for row, length in zip(taken, lengths, strict=True)]


def by_labels(cost: Floats, sizes: Ints, candidates_max: int) -> list[Cuts]:
    """The same for any sizes. TooManyCandidates: more than `candidates_max` in all."""
    n = len(sizes)
    at: list[tuple[Ints, Floats]] = [(np.zeros(1, dtype=np.int64), np.zeros(1))]  # of machine 0: nothing yet
    parents: list[tuple[Ints, Ints]] = [(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))]
    count = 0
    for j in range(1, n + 1):
        count += sum(len(at[i][0]) for i in range(j))
        if count > candidates_max:
            raise TooManyCandidates
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


# Merging neighbours one pair at a time: SWIFT's selective logging, the baseline (arXiv 2302.06173, and the authors'
# planner, `merge_groups` in github.com/jasperzhong/swift).
#
# Every machine is a group. While the log is too big, the pair of neighbours is merged for which the recovery time grows
# least for the bytes that are saved:
#
#     score = (R(merged) (p_a + p_b) - R(a) p_a - R(b) p_b) / V       p: probability that a failure is the group's
#
# Two things are put right here: V counts both directions, where the authors' program counts activations alone, and p
# counts the machines of the groups as they are, where theirs takes every group for one machine. The cap only says
# where to stop, so there is one sequence of n choices.


def merges(model: CostModel, *, additive: bool) -> list[Cuts]:
    """All choices on the way from every machine by itself to one group of all.

    `additive`: R as the paper estimates it, of one step, R(merged) = R(a) + R(b) + V / network bandwidth; else as this
    model has it. Either way what comes out is to be judged by the model.
    """
    n, network = model.n, model.profile.network_bytes_per_s
    begins = np.arange(n)
    ends = begins + 1
    table = model.replay_step_s if additive else model.recovery_s
    recovery = table[begins, ends]
    chance = model.probability[begins, ends]
    choices: list[Cuts] = [tuple(range(1, n))]
    while len(begins) > 1:
        size = model.edge_bytes[begins[1:]].astype(np.float64)
        if additive:
            merged = recovery[:-1] + recovery[1:] + (0.0 if network is None else size / network)
        else:
            merged = table[begins[:-1], ends[1:]]
        parts = recovery * chance
        score = (merged * (chance[:-1] + chance[1:]) - parts[:-1] - parts[1:]) / size
        pair = int(score.argmin())
        recovery[pair] = merged[pair]
        chance[pair] += chance[pair + 1]
        ends[pair] = ends[pair + 1]
        begins, ends = np.delete(begins, pair + 1), np.delete(ends, pair + 1)
        recovery, chance = np.delete(recovery, pair + 1), np.delete(chance, pair + 1)
        choices.append(tuple(begins[1:].tolist()))
    return choices


# Does the log pay, and how often is a checkpoint to be saved? docs/planning.md derives it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One choice of groups at its best interval."""

    cuts: Cuts
    steps: int
    """From checkpoint to checkpoint."""
    useful: float
    """The share of time that is training, 0 to 1."""
    limited_by_cap: bool
    """More steps would be better, and the cap does not allow them."""


def pays_bytes(model: CostModel, chosen: Cuts) -> dict[str, Any]:
    """The log's bytes against those of the checkpoints that it avoids."""
    profile = model.profile
    restore_s, step_s = model.means((), 0.0)
    balanced = balance(
        steps=profile.checkpoint_interval_steps,
        log_bytes=model.bytes_per_step(chosen) * profile.checkpoint_interval_steps,
        checkpoint_bytes=sum(profile.checkpoint_bytes),
        recovery_s=model.expected_recovery_s(chosen),
        restore_s=restore_s,
        step_s=step_s,
    )
    return {**asdict(balanced), "pays": balanced.pays}


def pace(model: CostModel, cuts: Cuts) -> Pace:
    """What the interval between checkpoints depends on, with these cuts; in seconds."""
    profile, step_s = model.profile, model.step_s + model.overhead_s(cuts)
    # Replay is counted from the failure on, not in whole steps: half a step more of it, which the rest had.
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
    """The longest interval that keeps to the cap; below 1 if none does."""
    if cap is None:
        return math.inf
    if cap.kind == "storage_bytes":
        per_step = model.bytes_per_step(cuts)
        return cap.value // per_step if per_step else math.inf
    bounds = [model.means(cuts, 0.0)] if cap.kind == "recovery_s" else model.parts(cuts)
    # down + (K - 1) / 2 replay <= cap; an interval that meets it to the last bit is one.
    return min(math.floor(1 + 2 * (cap.value - down_s) / replay_s + 1e-9) for down_s, replay_s in bounds)


def option(model: CostModel, cuts: Cuts, cap: Cap | None) -> Option | None:
    """These cuts with their best interval, in steps. None: the cap leaves no interval at all."""
    most = steps_max(model, cuts, cap)
    if most < 1:
        return None
    time = pace(model, cuts)
    steps = time.best_steps(most)
    return Option(
        cuts=cuts,
        steps=steps,
        useful=time.useful(steps),
        limited_by_cap=steps == most and steps < time.best_steps(),
    )


def intervals(model: CostModel, chosen: Cuts, choices: Iterable[Cuts], cap: Cap | None) -> dict[str, Any]:
    """The best interval with the chosen groups, without a log, and with the best of `choices`.

    Groups are those that are worth having at the profile's own interval, with as many copies as there.
    """
    mine, alone = option(model, chosen, cap), option(model, (), cap)
    others = [option(model, cuts, cap) for cuts in choices]
    best = _best([alone, mine, *others])
    with_log, without = pace(model, chosen), pace(model, ())
    formula = (with_log.save_s, with_log.ratio, with_log.mtbf_s)
    now = model.profile.checkpoint_interval_steps
    return {
        "save_s": with_log.save_s,
        "replay_ratio": with_log.ratio,
        "young_s": young_s(*formula),
        "daly_s": daly_s(*formula),
        "now": {
            "steps": now,
            "useful": with_log.useful(now),
            "useful_without_log": without.useful(now),
        },
        **{
            name: None if interval is None else _shown(model, interval)
            for name, interval in (("chosen", mine), ("without_log", alone), ("best", best))
        },
        "log_pays": best is not None and best.cuts != (),
    }


def _shown(model: CostModel, option: Option) -> dict[str, Any]:
    return {
        "groups": len(option.cuts) + 1,
        "logged": [model.edges[cut] for cut in option.cuts],
        "steps": option.steps,
        "useful": option.useful,
        "limited_by_cap": option.limited_by_cap,
    }


def _best(options: Sequence[Option | None]) -> Option | None:
    """The first of those with the greatest useful share: what logs nothing stands first."""
    return max((option for option in options if option is not None), key=lambda o: o.useful, default=None)


FORMAT = 1
ROWS_MAX = 24
GROUPS_SHOWN = 16
BETTER = 1e-9
"""By less than that share of it, two recovery times are the same."""


def build(profile: Profile, cap: Cap | None) -> dict[str, Any]:
    """The whole document. Numbers that are infinite become None."""
    model = CostModel(profile)
    merged = {additive: merges(model, additive=additive) for additive in (True, False)}
    curve, chosen, problem = choose(model, cap, [*merged[True], *merged[False]])
    prediction = model.predict(chosen)
    swift, own = ([_row(model, cuts) for cuts in merged[additive]] for additive in (True, False))
    rows = [_row(model, point.cuts) for point in curve.points]
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
        "chosen": {**asdict(prediction), "logged": list(prediction.logged), "text": groups_text(prediction)},
        "frontier": {
            "exact": curve.resolution_bytes == 0,
            "resolution_bytes": curve.resolution_bytes,
            "points": rows,
        },
        "swift": swift,
        "greedy": own,
        "compared": _finite(compared(rows, swift, own)),
        "pays": _finite(pays_bytes(model, chosen)),
        "interval": _finite(intervals(model, chosen, [point.cuts for point in curve.points], cap)),
    }


def groups_text(prediction: Prediction) -> str:
    """The stages of each group, as `Session.from_env(groups=...)` takes them."""
    ends = [(first, end - 1) for first, end in (group.stages for group in prediction.groups)]
    return ",".join(f"{first}" if last == first else f"{first}-{last}" for first, last in ends)


def choose(model: CostModel, cap: Cap | None, others: Sequence[Cuts] = ()) -> tuple[Frontier, Cuts, str]:
    """(frontier, groups, "" or why the cap cannot be met, with the groups that come closest).

    `others`: choices that are known already, for a frontier that is not exact.
    """
    if cap is not None and cap.kind == "worst_recovery_s":
        within = _frontier(model, others, cap.value)
        if within.points:
            return within, within.points[0].cuts, ""
        curve = _frontier(model, others)
        closest = min(curve.points, key=lambda point: model.worst_recovery_s(point.cuts))
        least = f"{model.worst_recovery_s(closest.cuts):.4g} s is the least that is found"
        return curve, closest.cuts, f"no groups recover from every failure within {cap.value:g} s; {least}"
    curve = _frontier(model, others)
    if cap is None:
        return curve, curve.points[-1].cuts, ""
    point: Point | None
    if cap.kind == "recovery_s":
        point, last = curve.by(cap.value), curve.points[-1]
        problem = f"no groups recover within {cap.value:g} s on average; {last.recovery_s:.4g} s is the least"
        return (curve, point.cuts, "") if point is not None else (curve, last.cuts, problem)
    profile = model.profile
    room = cap.value // profile.checkpoint_interval_steps - profile.other_bytes
    point = curve.within(max(room, 0))  # one group of all keeps to any cap: it logs nothing
    assert point is not None
    return curve, point.cuts, ""


def _frontier(model: CostModel, others: Sequence[Cuts], worst_s: float = math.inf) -> Frontier:
    curve = exact(model, worst_s=worst_s)
    return joined(model, curve, others, worst_s=worst_s) if curve.resolution_bytes else curve


def _row(model: CostModel, cuts: Cuts) -> dict[str, Any]:
    per_step = model.bytes_per_step(cuts)
    return {
        "groups": len(cuts) + 1,
        "bytes_per_step": per_step,
        "storage_bytes": per_step * model.profile.checkpoint_interval_steps,
        "overhead_s": model.overhead_s(cuts),
        "recovery_s": model.expected_recovery_s(cuts),
        "worst_recovery_s": model.worst_recovery_s(cuts),
        "logged": [model.edges[cut] for cut in cuts],
    }


def compared(
    rows: Sequence[dict[str, Any]], swift: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """At every size of the frontier and of SWIFT's merge: the shortest recovery that each has within it."""
    sizes = sorted({row["storage_bytes"] for row in [*rows, *swift]})
    shortest_at = []
    best = [_Shortest(choices) for choices in (rows, swift, own)]
    for size in sizes:
        exact_s, swift_s, greedy_s = (shortest.within(size) for shortest in best)
        shortest_at.append(
            {"storage_bytes": size, "exact_s": exact_s, "swift_s": swift_s, "greedy_s": greedy_s}
        )
    return shortest_at


class _Shortest:
    """Asked with ascending sizes."""

    def __init__(self, choices: Sequence[dict[str, Any]]) -> None:
        self._left = sorted(choices, key=lambda row: -int(row["storage_bytes"]))
        self._least = math.inf

    def within(self, size: int) -> float:
        while self._left and self._left[-1]["storage_bytes"] <= size:
            self._least = min(self._least, self._left.pop()["recovery_s"])
        return self._least


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dumps(document: dict[str, Any]) -> str:
    """One line for each choice: there may be a thousand of a thousand boundaries."""
    parts = []
    for name, value in document.items():
        if name == "frontier":
            head = {key: entry for key, entry in value.items() if key != "points"}
            points = ",\n  ".join(json.dumps(point) for point in value["points"])
            parts.append(f'"frontier": {json.dumps(head)[:-1]}, "points": [\n  {points}]}}')
        elif name in ("swift", "greedy", "compared"):
            parts.append(f'"{name}": [\n  ' + ",\n  ".join(json.dumps(row) for row in value) + "]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


# --- text ---


def text(document: dict[str, Any]) -> str:
    """The document as text, for a terminal."""
    lines = [
        f"{document['name']}: {document['stages']} stages on {document['machines']} machines, "
        f"{seconds_words(document['step_s'])} a step, a failure every {seconds_words(document['mtbf_s'])}",
        "",
        *_table(document),
        "",
        _better(document),
        "",
        *_chosen(document),
        "",
        _pays_words(document),
        *_interval_words(document),
    ]
    return "\n".join(lines)


def size_words(size: float) -> str:
    """1234567 -> "1.235 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.4g} {unit}"
        size /= 1000
    raise AssertionError


def seconds_words(seconds: float | None) -> str:
    """5400.0 -> "90 min"."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.4g} s"


def _table(document: dict[str, Any]) -> list[str]:
    points, chosen = document["frontier"]["points"], document["chosen"]["logged"]
    others = {row["storage_bytes"]: row for row in document["compared"]}
    rows = [["", "groups", "log", "overhead", "recovery", "at worst", "greedy", "SWIFT"]]
    for index in _selected(points, chosen):
        point = points[index]
        other = others[point["storage_bytes"]]
        rows.append(
            [
                "*" if point["logged"] == chosen else "",
                str(point["groups"]),
                size_words(point["storage_bytes"]),
                f"{100 * point['overhead_s'] / document['step_s']:.2g} %",
                f"{point['recovery_s']:.4g} s",
                f"{point['worst_recovery_s']:.4g} s",
                *(_behind(point["recovery_s"], other[name]) for name in ("greedy_s", "swift_s")),
            ]
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    left_out = len(points) - (len(rows) - 1)
    exact = document["frontier"]["exact"]
    head = f"{len(points)} choices of recovery groups, of which none is better in bytes and in time"
    if not exact:
        head += (
            f" (not exact: sizes were rounded up to {size_words(document['frontier']['resolution_bytes'])})"
        )
    return [head, *lines, *([f"({left_out} more; --json has all)"] if left_out else [])]


def _selected(points: Sequence[dict[str, Any]], chosen: list[int]) -> list[int]:
    if len(points) <= ROWS_MAX:
        return list(range(len(points)))
    spread = {round(at * (len(points) - 1) / (ROWS_MAX - 2)) for at in range(ROWS_MAX - 1)}
    return sorted(spread | {i for i, point in enumerate(points) if point["logged"] == chosen})


def _behind(exact_s: float, other_s: float | None) -> str:
    if other_s is None:
        return "-"
    return f"+{100 * (other_s / exact_s - 1):.2g} %" if is_better(exact_s, other_s) else "same"


def is_better(exact_s: float, other_s: float | None) -> bool:
    """By more than rounding; also where the other one has nothing of that size."""
    return other_s is None or exact_s < other_s * (1 - BETTER)


def _better(document: dict[str, Any]) -> str:
    words = []
    for name, title in (("greedy_s", "the greedy merge"), ("swift_s", "SWIFT's merge")):
        gains = [
            row[name] / row["exact_s"] - 1
            for row in document["compared"]
            if row[name] is not None and row["exact_s"] is not None and is_better(row["exact_s"], row[name])
        ]
        total = len(document["compared"])
        most = f", by up to {100 * max(gains):.1f} %" if gains else ""
        words.append(f"quicker than {title} at {len(gains)} of {total} sizes{most}")
    return "the same bytes: " + "; ".join(words)


def _chosen(document: dict[str, Any]) -> list[str]:
    chosen, cap = document["chosen"], document["cap"]
    what = "without a cap: the shortest recovery"
    if cap is not None:
        ((kind, value),) = cap.items()
        amount = size_words(value) if kind == "storage_bytes" else seconds_words(value)
        what = {
            "storage_bytes": f"within {amount}: the shortest recovery",
            "recovery_s": f"back within {amount} on average: the fewest bytes",
            "worst_recovery_s": f"back within {amount} whoever fails: the fewest bytes",
        }[kind]
    lines = [
        what,
        f"  log {size_words(chosen['storage_bytes'])} until the next checkpoint, "
        f"{size_words(chosen['bytes_per_step'])} a step; overhead {seconds_words(chosen['overhead_s'])} a step",
        f"  recovery {seconds_words(chosen['recovery_s'])} on average, "
        f"{seconds_words(chosen['worst_recovery_s'])} at worst; "
        f"a replayed step takes {chosen['replay_ratio']:.2f} of a step",
    ]
    groups = chosen["groups"]
    for group in groups[:GROUPS_SHOWN]:
        (first, end), (begin, stop) = group["machines"], group["stages"]
        copies = f", {group['copies']} copies" if group["copies"] > 1 else ""
        lines.append(
            f"  {_run_words('machine', first, end)} ({_run_words('stage', begin, stop)}): "
            f"{seconds_words(group['recovery_s'])}{copies}"
        )
    if len(groups) > GROUPS_SHOWN:
        lines.append(f"  and {len(groups) - GROUPS_SHOWN} groups more")
    else:
        lines.append(f'  for the session: groups="{chosen["text"]}"')
    return lines


def _run_words(what: str, first: int, end: int) -> str:
    return f"{what} {first}" if end == first + 1 else f"{what}s {first} to {end - 1}"


def _pays_words(document: dict[str, Any]) -> str:
    pays = document["pays"]
    log, checkpoint = size_words(pays["log_bytes"]), size_words(pays["checkpoint_bytes"])
    if not document["chosen"]["logged"]:
        return "bytes: nothing is logged between groups; everybody restores the checkpoint"
    if pays["avoided"] is None:
        return (
            f"bytes: the log pays: {log}, and no frequency of checkpoints ({checkpoint} each) is back as soon"
        )
    verdict = "the log pays" if pays["pays"] else "the log does not pay"
    return (
        f"bytes: {verdict}: {log} against {pays['avoided']:.1f} checkpoints of {checkpoint} avoided in "
        f"{document['checkpoint_interval_steps']} steps (back as soon without a log: one every "
        f"{pays['equal_interval_steps']:.1f} steps)"
    )


def _interval_words(document: dict[str, Any]) -> list[str]:
    interval = document["interval"]
    verdict = "the log pays" if interval["log_pays"] else "the log does not pay"
    titles = (("best", "best of all"), ("chosen", "these groups"), ("without_log", "without a log"))
    lines = [f"time: {verdict}; the share of it that is training, at the best interval:"]
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
