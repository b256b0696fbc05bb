"""Axes of all drawings: a linear scale, and round tick values on it. Pure."""

import math

TICKS_MAX = 8

Point = tuple[float, float]


class Scale:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low + 1.0
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        return self._start + (value - self.low) / (self.high - self.low) * (self._end - self._start)


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Returns at most `TICKS_MAX` round numbers from `low` to `high`, or `low` alone if the span is empty."""
    if high <= low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / TICKS_MAX))
    unit = next(unit * m for m in (1, 2, 5, 10, 20) if (high - low) / (unit * m) <= TICKS_MAX - 1)
    if whole:
        unit = max(unit, 1.0)
    first = math.ceil(low / unit)
    marks = [round(n * unit, 12) for n in range(first, math.floor(high / unit) + 1)]
    return marks or [low]
