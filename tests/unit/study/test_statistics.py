"""Means with Student's t, beside those of scipy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.lab.study.figures import Estimate, estimate, t

stats = pytest.importorskip("scipy.stats", reason="scikit-learn is not installed")


@pytest.mark.parametrize("freedom", range(1, 120))
def test_quantiles(freedom: int) -> None:
    assert t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=6e-4)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40))
def test_intervals(values: list[float]) -> None:
    found = estimate(values)
    assert found is not None
    assert found.half is not None
    error = stats.sem(values)
    wanted = stats.t.ppf(0.975, len(values) - 1) * error
    assert found.mean == pytest.approx(sum(values) / len(values), abs=1e-9)
    assert found.half == pytest.approx(wanted, rel=1e-3, abs=1e-9)


def test_few_values() -> None:
    assert estimate([]) is None
    assert estimate([2.0]) == Estimate(2.0, None, 1)
    assert not Estimate(2.0, None, 1).tells_from_zero
    assert Estimate(2.0, 1.9, 3).tells_from_zero
    assert not Estimate(-2.0, 2.1, 3).tells_from_zero
