"""Every choice of groups than which none has both fewer bytes and a shorter expected recovery: exact.

Groups are runs of machines and both costs are sums over them, so choices for the machines before j matter to others by
their sums alone: a dynamic program over (j, bytes). Two of them, for the same answer:

grid    sizes are multiples of a unit g, as when all boundaries are alike: best[u, j], the least expected recovery of
        the machines before j with u units logged. O(n^2 U) time for n machines and U units, those above which nothing
        is gained any more: at most n^3 / 6 additions and comparisons for boundaries of one size. O(n U) memory
labels  any sizes: at each j the pairs (bytes, recovery) of which none is better in both. O(C log C) time, C candidates,
        whose number may double with every machine: above CANDIDATES_MAX sizes are rounded up to a grid, and the result
        says so. Then for every choice with k boundaries, bytes b and recovery r it has one with at most b + k g bytes
        and at most r

A point must be better than the one before by more than IMPROVEMENT of it; less is the rounding of a sum.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swift.plan.model import CostModel, Cuts, Floats

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
