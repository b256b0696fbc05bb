"""The share of time that is training, in closed form.

Assumed: times between faults are exponential, whatever the job does; a fault in a recovery makes it begin again; there
is always a node to take a lost one's place; and what brings the lost state back is never lost as well. Where these do
not hold the simulation stands beside it.

A strategy that replaces lost nodes: Daly's expected time of an interval (`swift.plan.interval.expected_s`; Daly, Future
Generation Computer Systems 22, 2006), from one of its resting points to the next.

One that goes on: faults and returns are two Poisson streams (the departures of an M/G/infinity queue are one: Mirasol,
Operations Research 11, 1963), and each event stops the job for its time s. An event in a stop begins another one, so
work x into a step costs exp(Lambda x) / l, with Lambda the rate of both and l the mean of exp(-Lambda s); a step of w

    E = (exp(Lambda w) - 1) / (Lambda l)

How many nodes are missing is Poisson's, with mean repair / MTBF, whatever the distribution of repairs is (Palm's
theorem). The missing nodes and the stops are taken to be independent; to the size of a fault's share that is not so.
"""

import math

from swift.plan.goodput.cluster import Cluster, Faults
from swift.plan.goodput.ways import Way
from swift.plan.interval import expected_s


def share(way: Way, cluster: Cluster, faults: Faults, repair_s: float) -> float:
    """Useful time over all time, 0 to 1."""
    mtbf_s = faults.job_mtbf_s(cluster)
    missing = repair_s / mtbf_s
    if way.speeds:
        return way.share_of_runs * running(way, mtbf_s, faults.together) * mean_speed(way, cluster, missing)
    event_s = mtbf_s / (1 - faults.together)
    expected = expected_s(way.work_s, way.stall_s, way.stop_s, way.ratio, event_s)
    running_share = (way.work_s + way.stall_s) / expected
    ready = 1.0 if way.spares is None else cdf(way.spares, missing)
    return way.share_of_runs * running_share * ready


def running(way: Way, mtbf_s: float, together: float) -> float:
    """The share of time in which a job that goes on without lost nodes does new work."""
    lost, back = (1 - together) / mtbf_s, 1 / mtbf_s
    rate = lost + back
    mean = (lost * math.exp(-rate * way.stop_s) + back * math.exp(-rate * way.back_s)) / rate
    x = rate * way.work_s * way.ratio
    return mean * (x / math.expm1(x) if 0 < x < 700 else float(x == 0))


def mean_speed(way: Way, cluster: Cluster, missing: float) -> float:
    """Over the number of missing nodes, `missing` on average."""
    parts = cluster.parts if way.by_part else 1
    total, below = 0.0, 0.0
    for speed, at_most in zip(way.speeds, cdfs(len(way.speeds) - 1, missing / parts), strict=True):
        until = at_most**parts
        total += speed * (until - below)
        below = until
    return total


def cdfs(most: int, mean: float) -> list[float]:
    """P(N <= k) of a Poisson number, for k = 0 to `most`."""
    if mean == 0:
        return [1.0] * (most + 1)
    total, sums = 0.0, []
    for k in range(most + 1):
        total += math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
        sums.append(min(1.0, total))
    return sums


def cdf(most: int, mean: float) -> float:
    """P(N <= most) of a Poisson number."""
    return cdfs(most, mean)[-1]
