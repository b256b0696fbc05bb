"""Traces of faults, and durations: what is read, and each way to be refused in one line."""

import argparse
import math

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.goodput import cluster
from swift_ft.lab.plan.arguments import duration

FAULTS = [(float(k * k), k * k + 2.0, f"n{k % 3}") for k in range(10)]


def test_a_trace_gives_times_outages_and_nodes() -> None:
    read = cluster.Trace.of(FAULTS[::-1])
    assert read.gaps_s == tuple(2 * k + 1 for k in range(9))
    assert (read.outages_s, read.nodes, read.mean_gap_s, read.repair_s) == ((2.0,) * 9, 3, 9, 2)
    assert (read.together, read.cv) == (0, pytest.approx(math.sqrt(20 / 3) * 2 / 9))
    assert cluster.Trace.of([*FAULTS, FAULTS[3]]).together == pytest.approx(1 / 10)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (FAULTS[:9], "has 9 faults that ended: give 10 or more"),
        ([(1.0, 2.0, "a")] * 12, "at the same moment"),
    ],
)
def test_a_trace_that_says_too_little_is_refused(faults: list[tuple[float, float, str]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cluster.Trace.of(faults)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5h", 5400.0),
        ("30min", 1800.0),
        ("264d", 264 * 86400.0),
        ("250ms", 0.25),
        ("1e3s", 1000.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "3 weeks", "nan", "inf", "1e999", "0x10", "5m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write a time"):
        duration(text)
