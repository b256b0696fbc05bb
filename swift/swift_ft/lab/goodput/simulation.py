"""The share of time that is training, by discrete events: many trials at once, one row of the arrays each.

Events are faults, which occur regardless of the job's state, and returns of nodes. Between two events a job first
spends the remaining time of its recovery, then trains. Work counts only once the next resting point is reached. A fault
during a recovery restarts it; if that takes the last node with the required state, the job falls back. All strategies
see the same faults (`Sample`), so their difference has little noise.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swift_ft.lab.goodput.cluster import Cluster, Faults
from swift_ft.lab.goodput.ways import Way

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TRIALS, SPAN, BURN = 400, 60.0, 10.0
"""Number of trials; their length, and the uncounted part at their start, in mean times between faults of the job."""
TRIALS_MIN, CELLS_MAX = 40, 4_000_000
MOMENTS = 50
"""Moments in each trial at which the missing nodes are counted."""
SIGMA_95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Random draws for all strategies, as arrays of trials x faults. Seconds."""

    burn_s: float
    until_s: float
    at: Floats
    """Times of the faults, ascending; the last one is at `until_s` or later."""
    hit: Floats
    """Uniform draw, 0 to 1: decides whether a fault hits a node on which a recovery depends."""
    spot: Floats
    """Uniform draw, 0 to 1: selects the part of the model on the node."""
    repair: Floats
    """Time until the node returns."""
    begun_until: Floats
    """Trials x nodes that are missing when the trial begins: times of their return; inf: no node."""
    begun_spot: Floats


def sample(
    faults: Faults, cluster: Cluster, repair_s: float, *, seed: int, trials: int = TRIALS, span: float = SPAN
) -> Sample:
    """Draws a sample of the stationary process: the first fault and the initially missing nodes are those of a random
    moment.

    With a trace, the number of initially missing nodes is drawn as if faults were independent. Large clusters get fewer
    trials than `trials`, to limit memory.
    """
    rng = np.random.default_rng([seed, cluster.ranks])
    mtbf_s = faults.job_mtbf_s(cluster)
    columns = int(span + 8 * faults.cv * math.sqrt(span) + 20)
    trials = min(trials, max(TRIALS_MIN, int(CELLS_MAX / (columns + repair_s / mtbf_s + cluster.parts))))
    gaps, repair = _drawn(faults, rng, trials, columns)
    while (missing := span - float(gaps.sum(axis=1).min())) > 0:
        more, repairs = _drawn(faults, rng, trials, int(missing) + 20)
        gaps, repair = np.hstack([gaps, more]), np.hstack([repair, repairs])
    away = rng.poisson(repair_s / mtbf_s, trials)
    begun = np.arange(max(1, int(away.max()))) < away[:, None]
    rest = _rest_of_repairs(faults, rng, begun.shape)
    return Sample(
        burn_s=BURN * mtbf_s,
        until_s=span * mtbf_s,
        at=np.cumsum(gaps, axis=1) * mtbf_s,
        hit=rng.random(gaps.shape),
        spot=rng.random(gaps.shape),
        repair=repair * repair_s,
        begun_until=np.where(begun, rest * repair_s, np.inf),
        begun_spot=rng.random(begun.shape),
    )


def _drawn(faults: Faults, rng: np.random.Generator, rows: int, columns: int) -> tuple[Floats, Floats]:
    """Draws times between faults, and repair times, each with mean 1."""
    if faults.trace is not None:
        gaps_s, outages_s = np.array(faults.trace.gaps_s), np.array(faults.trace.outages_s)
        # The first gap contains a random moment: its choice is weighted by length, and a random part of it has passed.
        first = rng.choice(len(gaps_s), size=(rows, 1), p=gaps_s / gaps_s.sum())
        at = (first + np.arange(columns)) % len(gaps_s)
        mean_s = max(float(outages_s.mean()), 1e-9)
        gaps = gaps_s[at] / gaps_s.mean()
        gaps[:, 0] *= rng.random(rows)
        return gaps, outages_s[at] / mean_s
    mean = math.gamma(1 + 1 / faults.shape)
    gaps = rng.weibull(faults.shape, (rows, columns)) / mean
    if faults.shape != 1.0:  # the gap around a random moment: a part of one drawn by its length
        whole = rng.gamma(1 + 1 / faults.shape, 1.0, rows) ** (1 / faults.shape) / mean
        gaps[:, 0] = whole * rng.random(rows)
    return gaps, rng.exponential(1.0, (rows, columns))


def _rest_of_repairs(faults: Faults, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    if faults.trace is None:
        return rng.exponential(1.0, shape)
    outages_s = np.array(faults.trace.outages_s)
    if not outages_s.sum() > 0:
        return np.zeros(shape)
    whole = rng.choice(outages_s, size=shape, p=outages_s / outages_s.sum())
    rest: Floats = whole / outages_s.mean() * rng.random(shape)
    return rest


def spares_needed(sample: Sample, sure: float = 0.999) -> int:
    """Returns the number of spare nodes that suffices for the share `sure` of the time."""
    moments = np.linspace(sample.burn_s, sample.until_s, MOMENTS)
    away = [
        (sample.begun_until > moment).sum(axis=1, where=np.isfinite(sample.begun_until))
        + ((sample.at <= moment) & (sample.at + sample.repair > moment)).sum(axis=1)
        for moment in moments
    ]
    return int(np.quantile(np.concatenate(away), sure, method="inverted_cdf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of all trials. Shares are of the counted time."""

    useful: float
    error: float
    """Half of the 95 % interval of `useful`."""
    shares: Floats
    """Useful share of each trial."""
    stopped: float
    """Share spent in recoveries, repeated work included."""
    waited: float
    """Share spent waiting for a repair."""
    slowed: float
    """Share lost to reduced speed while nodes were missing."""
    faults: int
    in_recovery: int
    """Number of the faults that occurred during a recovery or a wait."""
    fell: int
    """Number of fallbacks because the state for a recovery was lost."""


def simulate(way: Way, cluster: Cluster, sample: Sample) -> Outcome:
    """Simulates every trial to its end. Deterministic in its arguments."""
    return _Trials(way, cluster, sample).outcome()


class _Trials:
    def __init__(self, way: Way, cluster: Cluster, sample: Sample) -> None:
        self._way, self._cluster, self._sample = way, cluster, sample
        rows = len(sample.at)
        self._rows: Ints = np.arange(rows)
        self._now, self._place, self._saved, self._owed = (np.zeros(rows) for _ in range(4))
        self._useful, self._stopped, self._waited, self._slowed = (np.zeros(rows) for _ in range(4))
        self._next: Ints = np.zeros(rows, dtype=np.int64)
        self._hits: Ints = np.zeros(rows, dtype=np.int64)
        self._fell: Bools = np.zeros(rows, dtype=np.bool_)
        self._faults = self._in_recovery = self._falls = 0
        self._cycle_s = way.work_s + way.stall_s
        self._saved_cycle_s = self._cycle_s if way.by_checkpoint else way.every_s + way.save_s
        self._speeds = np.array(way.speeds)
        self._away = _Away(way, cluster, sample) if way.speeds or way.spares is not None else None

    def outcome(self) -> Outcome:
        """Runs all trials."""
        sample = self._sample
        while True:
            fault_s = sample.at[self._rows, self._next]
            back_s = np.full_like(fault_s, np.inf) if self._away is None else self._away.next_s
            event_s = np.minimum(fault_s, back_s)
            mark_s = np.where(self._now < sample.burn_s, sample.burn_s, sample.until_s)
            until_s = np.minimum(event_s, mark_s)
            self._run(until_s)
            if (self._now >= sample.until_s).all():
                break
            happens = (event_s <= until_s) & (until_s < sample.until_s)
            self._fault(happens & (fault_s <= back_s))
            self._back(happens & (back_s < fault_s))
        counted_s = sample.until_s - sample.burn_s
        shares = self._useful * self._way.share_of_runs / counted_s
        rows = len(shares)
        return Outcome(
            useful=float(shares.mean()),
            error=SIGMA_95 * float(shares.std(ddof=1)) / math.sqrt(rows),
            shares=shares,
            stopped=float(self._stopped.mean()) / counted_s,
            waited=float(self._waited.mean()) / counted_s,
            slowed=float(self._slowed.mean()) / counted_s,
            faults=self._faults,
            in_recovery=self._in_recovery,
            fell=self._falls,
        )

    def _speed(self) -> Floats | float:
        if self._away is None:
            return 1.0
        if not self._way.speeds:
            return np.where(self._away.total > (self._way.spares or 0), 0.0, 1.0)
        missing = self._away.most if self._way.by_part else self._away.total
        speed: Floats = self._speeds[np.minimum(missing, len(self._speeds) - 1)]
        return speed

    def _run(self, until_s: Floats) -> None:
        """Advances to `until_s`: first the remaining recovery, then training."""
        passed_s, speed = until_s - self._now, self._speed()
        counts = self._now >= self._sample.burn_s
        idle = speed == 0
        paid_s = np.where(idle, 0.0, np.minimum(self._owed, passed_s))
        self._owed -= paid_s
        ran_s = passed_s - paid_s
        done_s = ran_s * speed
        rested, self._place = np.divmod(self._place + done_s, self._cycle_s)
        self._saved = np.mod(self._saved + done_s, self._saved_cycle_s)
        self._useful += counts * rested * self._cycle_s
        self._stopped += counts * paid_s
        self._waited += counts * np.where(idle, ran_s, 0.0)
        self._slowed += counts * np.where(idle, 0.0, ran_s - done_s)
        self._fell &= (self._owed > 0) | idle
        self._now = until_s

    def _fault(self, happens: Bools) -> None:
        way, at = self._way, (self._rows, np.minimum(self._next, self._sample.at.shape[1] - 1))
        busy = happens & ((self._owed > 0) | (self._speed() == 0))
        self._hits = np.where(happens & ~busy, 0, self._hits)
        others = max(1, self._cluster.nodes - 1)
        hit = busy & (self._sample.hit[at] * others < way.partners - self._hits)
        self._hits += hit
        lost = hit & (self._hits >= way.needed)
        if self._away is not None:
            self._away.leave(happens, self._sample.spot[at])
            if way.speeds:
                lost = lost | (happens & (self._speed() == 0))
        self._falls += int((lost & ~self._fell).sum())
        self._fell |= lost
        self._owe(happens, way.stop_s)
        self._next += happens
        self._faults += int(happens.sum())
        self._in_recovery += int(busy.sum())

    def _back(self, happens: Bools) -> None:
        if self._away is None or not happens.any():
            return
        self._away.come_back(happens)
        if self._way.speeds:
            self._owe(happens, self._way.back_s)

    def _owe(self, who: Bools, stop_s: float) -> None:
        """Starts or restarts a recovery in the rows of `who`."""
        way = self._way
        back_s = np.where(
            self._fell, way.fall_stop_s + way.fall_ratio * self._saved, stop_s + way.ratio * self._place
        )
        self._owed = np.where(who, back_s, self._owed)


class _Away:
    """The missing nodes. All return times are drawn in advance, so a pointer into their sorted list suffices."""

    def __init__(self, way: Way, cluster: Cluster, sample: Sample) -> None:
        self._parts = cluster.parts
        rows = len(sample.at)
        self._rows: Ints = np.arange(rows)
        backs = np.hstack([sample.begun_until, sample.at + sample.repair, np.full((rows, 1), np.inf)])
        order = backs.argsort(axis=1, kind="stable")
        self._backs: Floats = np.take_along_axis(backs, order, axis=1)
        spots = np.hstack([sample.begun_spot, sample.spot, np.zeros((rows, 1))])
        self._back_parts = self._part_of(np.take_along_axis(spots, order, axis=1))
        self._next: Ints = np.zeros(rows, dtype=np.int64)
        begun = np.isfinite(sample.begun_until)
        self.total: Ints = begun.sum(axis=1)
        self._of_part: Ints | None = None
        if way.by_part:
            self._of_part = np.zeros((rows, self._parts), dtype=np.int64)
            at, column = np.nonzero(begun)
            np.add.at(self._of_part, (at, self._part_of(sample.begun_spot)[at, column]), 1)
        self._find()

    def _part_of(self, spot: Floats) -> Ints:
        parts: Ints = np.minimum((spot * self._parts).astype(np.int64), self._parts - 1)
        return parts

    def _find(self) -> None:
        self.next_s: Floats = self._backs[self._rows, self._next]
        """Time of the next node's return."""
        self.most: Ints = self.total if self._of_part is None else self._of_part.max(axis=1)
        """Number of missing nodes in the part that lacks most."""

    def leave(self, who: Bools, spot: Floats) -> None:
        """Marks a node as missing in each row of `who`."""
        self.total = self.total + who
        if self._of_part is not None:
            self._of_part[self._rows[who], self._part_of(spot)[who]] += 1
        self._find()

    def come_back(self, who: Bools) -> None:
        """Marks the next node as returned in each row of `who`."""
        self.total = self.total - who
        if self._of_part is not None:
            rows = self._rows[who]
            self._of_part[rows, self._back_parts[rows, self._next[who]]] -= 1
        self._next = self._next + who
        self._find()
