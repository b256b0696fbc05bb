"""What a benchmark says of noisy ratios: an interval around the median, a verdict only if all of it is on one side."""

import random
import statistics
from collections.abc import Sequence

_RESAMPLES = 2000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap; the same for the same values."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[round(0.025 * (_RESAMPLES - 1))], medians[round(0.975 * (_RESAMPLES - 1))]


def verdict(low: float, high: float, goal: float | None, enough: bool = True) -> str:
    """The interval against the goal. An interval wider than twice what the goal allows shows nothing but noise."""
    if goal is None:
        return ""
    if not enough:
        return "INCONCLUSIVE"
    if low > goal:
        return "missed"
    if high <= goal and high - low <= 2 * (goal - 1):
        return "met"
    return "INCONCLUSIVE"
