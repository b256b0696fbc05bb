"""The closed forms, against other ways to the same numbers."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import pdtr

from swift_ft.lab.goodput import report, ways
from tests.unit.plan.goodput.cases import DAY, HOUR, MTBF_S, cluster, made, way


def by_quadrature(stop_s: float, back_s: float, work_s: float, mtbf_s: float) -> float:
    """Share of new work: every moment of a step costs the recoveries that may begin there, attempt by attempt."""
    rate = 2 / mtbf_s

    def recovery_s(done_s: float) -> float:
        """Expected seconds from an event until the job does new work."""
        expected, still = 0.0, 1.0
        for _ in range(2000):  # attempts; each is cut off by the next event, or it is not
            passes, lasts = 0.0, 0.0
            for stop in (stop_s, back_s):
                length = stop + done_s
                survives = math.exp(-rate * length)
                passes += survives / 2
                lasts += (1 - survives) / rate / 2  # the mean of the least of both
            expected += still * lasts
            still *= 1 - passes
            if still < 1e-13:
                break
        return expected

    n = 200
    points = [1 + rate * recovery_s(work_s * k / n) for k in range(n + 1)]
    weights = [1 if k in (0, n) else 4 if k % 2 else 2 for k in range(n + 1)]
    total = sum(w * p for w, p in zip(weights, points, strict=True)) * work_s / n / 3
    return work_s / total


@pytest.mark.parametrize(
    ("stop_s", "back_s", "work_s"), [(100, 40, 6), (0, 0, 600), (500, 900, 1), (30, 0, 300)]
)
def test_a_job_that_goes_on_has_the_share_of_its_attempts(
    stop_s: float, back_s: float, work_s: float
) -> None:
    one = way(
        stop_parts=(("stop", stop_s),), back_s=back_s, work_s=work_s, every_s=1.0, speeds=(1.0, 1.0, 0.0)
    )
    assert report.running(one, 2000.0) == pytest.approx(
        by_quadrature(stop_s, back_s, work_s, 2000.0), rel=1e-8
    )


def test_a_job_that_finishes_its_step_does_nothing_again() -> None:
    one = way(back_s=100.0, work_s=50.0, ratio=0.0, speeds=(1.0, 0.0))
    assert report.running(one, 1000.0) == pytest.approx(math.exp(-2 * 100.0 / 1000.0))


def test_without_faults_only_what_is_always_paid_is_lost() -> None:
    one = way(stall_s=50.0, by_checkpoint=True, overhead=0.25)
    assert report.useful_share(one, cluster(), 1e10, HOUR) == pytest.approx(1000 / 1050 / 1.25, rel=1e-6)
    other = way(work_s=6.0, every_s=900.0, save_s=100.0)
    assert report.useful_share(other, cluster(), 1e10, HOUR) == pytest.approx(0.9, rel=1e-6)


def test_the_mean_speed_is_that_of_so_many_missing_nodes() -> None:
    straight = way(speeds=tuple(1 - k / 200 for k in range(201)))
    assert report.mean_speed(straight, cluster(), 7.5) == pytest.approx(1 - 7.5 / 200, rel=1e-9)


def test_the_mean_speed_by_part_is_that_of_the_part_that_lacks_most() -> None:
    size = cluster()
    assert size.parts == 16
    one = way(speeds=(1.0, 0.5, 0.0), by_part=True)
    none, at_most_one = math.exp(-8.0), math.exp(-8.0) * (1 + 0.5) ** 16
    expected = none + 0.5 * (at_most_one - none)
    assert report.mean_speed(one, size, 8.0) == pytest.approx(expected, rel=1e-9)


def test_a_way_that_waits_has_the_share_of_time_in_which_nobody_is_missing() -> None:
    one = way(stop_parts=(), work_s=1e-3, spares=2)
    # 128 nodes, a fault each 30 days: 4 in 22.5 hours.
    missing = 22.5 * HOUR / (30 * DAY / 128)
    assert report.useful_share(one, cluster(), MTBF_S / 128, 22.5 * HOUR) == pytest.approx(
        math.exp(-missing) * (1 + missing + missing**2 / 2), rel=1e-3
    )


@settings(deadline=None, max_examples=60)
@given(
    st.floats(1.0, 400.0),
    st.sampled_from([128, 1024, 16384]),
    st.floats(0.5, 300.0),
)
def test_shares_are_shares_and_more_faults_are_never_better(days: float, ranks: int, repair_h: float) -> None:
    size = cluster(ranks=ranks, replicas=max(1, ranks // 128))
    more, fewer = days * DAY, 2 * days * DAY
    often, seldom = made(size, more), made(size, fewer)
    for name in often:
        low = report.useful_share(often[name], size, more / size.nodes, repair_h * HOUR)
        high = report.useful_share(seldom[name], size, fewer / size.nodes, repair_h * HOUR)
        assert 0 <= low <= high + 1e-9 <= 1 + 1e-9, name


def test_the_published_share_is_within_reach() -> None:
    """Llama 3 (section 3.3.4) reports more than 90 % effective training time, restarting from checkpoints."""
    from swift_ft.lab.goodput.figures import PRESETS

    preset = PRESETS["llama3"]
    size = cluster(ranks=preset.ranks, replicas=128)
    restart = made(size, preset.mtbf_s)[ways.RESTART]
    share = report.useful_share(restart, size, preset.mtbf_s / size.nodes, DAY)
    assert 0.90 < share < 0.97


def test_spares_needed_is_the_quantile_of_the_missing() -> None:
    needed = report.spares_needed(42.9)
    assert pdtr(needed - 1, 42.9) < 0.999 <= pdtr(needed, 42.9)
