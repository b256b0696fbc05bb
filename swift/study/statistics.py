"""Means over seeds, with the 95 % interval of Student's t. Pure."""

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
)
"""The 97.5 % quantile for 1, 2, ... degrees of freedom."""
_Z = 1.959964


class Estimate(NamedTuple):
    """Of a mean."""

    mean: float
    half: float | None
    """Half of the interval. None: one value has none."""
    n: int

    @property
    def tells_from_zero(self) -> bool:
        """Whether zero is outside of the interval."""
        return self.half is not None and abs(self.mean) > self.half


def estimate(values: Iterable[float]) -> Estimate | None:
    """None without values."""
    known = list(values)
    if not known:
        return None
    mean = statistics.fmean(known)
    if len(known) == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, t(len(known) - 1) * statistics.stdev(known) / math.sqrt(len(known)), len(known))


def t(freedom: int) -> float:
    """The 97.5 % quantile; above the table by the first terms of its expansion about the normal one."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)
