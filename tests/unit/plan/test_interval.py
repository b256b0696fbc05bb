"""How often to save: against published values, a numerical minimisation, and the process itself, simulated."""

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.lab.plan import report
from swift_ft.lab.plan.interval import Pace, best_work_s, expected_s
from swift_ft.lab.plan.model import CostModel
from swift_ft.lab.plan.profile import Cap
from tests.unit.plan.profiles import choices, profile

MINUTE, HOUR = 60.0, 3600.0
SAVE, MTBF, RATIO = st.floats(1e-3, 1e3), st.floats(1e3, 1e7), st.floats(0.01, 3.0)


def minimised(save_s: float, ratio: float, mtbf_s: float) -> float:
    """Where E / work is least, by golden section on log(work): nothing of the derivation is used."""

    def rate(log_work: float) -> float:
        work_s = math.exp(log_work)
        return expected_s(work_s, save_s, 0.0, ratio, mtbf_s) / work_s

    low, high = math.log(1e-6 * save_s), math.log(1e3 * mtbf_s / ratio)
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(200):
        one, other = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, other) if rate(one) <= rate(other) else (one, high)
    return math.exp((low + high) / 2)


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_dalys_published_intervals(mtbf_s: float, minutes: float) -> None:
    """Figures 3 to 5 of his paper: a dump takes 5 minutes."""
    assert best_work_s(5 * MINUTE, 1.0, mtbf_s) / MINUTE == pytest.approx(minutes, rel=0.01)


@settings(deadline=None)
@given(SAVE, RATIO, MTBF)
def test_the_best_interval_is_the_numerical_minimum(save_s: float, ratio: float, mtbf_s: float) -> None:
    best, found = best_work_s(save_s, ratio, mtbf_s), minimised(save_s, ratio, mtbf_s)
    at = expected_s(best, save_s, 0.0, ratio, mtbf_s) / best
    assert at <= expected_s(found, save_s, 0.0, ratio, mtbf_s) / found * (1 + 1e-12)
    # The minimum is flat: its place is known to the square root of what a float resolves.
    assert best == pytest.approx(found, rel=1e-4)


@settings(deadline=None)
@given(SAVE, RATIO, MTBF)
def test_a_log_that_replays_faster_is_a_job_that_fails_less_often(
    save_s: float, ratio: float, mtbf_s: float
) -> None:
    assert best_work_s(save_s, ratio, mtbf_s) == pytest.approx(best_work_s(save_s, 1.0, mtbf_s / ratio))


def lived(
    rng: random.Random, *, work_s: float, save_s: float, down_s: float, ratio: float, mtbf_s: float
) -> float:
    """One interval with failures at random; after each, down and replay up to where it was, begun again if cut off."""
    now, done = 0.0, 0.0
    while True:
        until = rng.expovariate(1 / mtbf_s)
        if done + until >= work_s + save_s:
            return now + work_s + save_s - done
        now += until
        done += until
        recovery_s = down_s + ratio * done
        while (again := rng.expovariate(1 / mtbf_s)) < recovery_s:
            now += again
        now += recovery_s


@pytest.mark.parametrize("ratio", [0.1, 0.6, 1.0, 1.4])
def test_the_expected_time_is_that_of_the_process(ratio: float) -> None:
    rng = random.Random(17)
    case = {"work_s": 300.0, "save_s": 30.0, "down_s": 40.0, "ratio": ratio, "mtbf_s": 400.0}
    times = [lived(rng, **case) for _ in range(20_000)]
    mean = sum(times) / len(times)
    error = math.sqrt(sum((t - mean) ** 2 for t in times)) / len(times)
    assert abs(mean - expected_s(**case)) < 4 * error


@settings(deadline=None)
@given(
    st.floats(0.1, 10.0),
    st.floats(0.0, 100.0),
    st.floats(0.05, 1.5),
    st.floats(100.0, 1e5),
    st.integers(1, 50),
)
def test_no_whole_number_of_steps_is_better(
    step_s: float, save_s: float, ratio: float, mtbf_s: float, most: int
) -> None:
    pace = Pace(step_s=step_s, save_s=save_s, down_s=5.0, ratio=ratio, mtbf_s=mtbf_s, useful_step_s=step_s)
    assert pace.best_steps(most) <= most
    assert pace.useful(pace.best_steps(most)) >= max(map(pace.useful, range(1, most + 1))) * (1 - 1e-12)
    free = pace.best_steps()
    around = range(max(1, free - 20), free + 20)
    assert pace.useful(free) >= max(map(pace.useful, around)) * (1 - 1e-12)


def test_time_that_cannot_be_had_is_infinite_and_not_an_error() -> None:
    assert expected_s(1e9, 1.0, 0.0, 1.0, 1.0) == math.inf
    pace = Pace(step_s=1.0, save_s=1.0, down_s=1e6, ratio=1.0, mtbf_s=1.0, useful_step_s=1.0)
    assert pace.useful(pace.best_steps()) == 0.0


@pytest.mark.parametrize("save_s", [1e-30, 1e-9, 30.0, 40.0, 1e3, 1e12])
def test_there_is_an_interval_however_long_saving_takes(save_s: float) -> None:
    """It grows with the time of saving, up to the MTBF."""
    best = best_work_s(save_s, 1.0, 1.0)
    assert 0 < best <= 1.0
    assert best <= best_work_s(2 * save_s, 1.0, 1.0)
    assert (best_work_s(0.0, 1.0, 1.0), Pace(step_s=1.0, **CERTAIN).best_steps()) == (0.0, 1)


CERTAIN: dict[str, float] = {"save_s": 0.0, "down_s": 0.0, "ratio": 1.0, "mtbf_s": 1.0, "useful_step_s": 1.0}


# --- does the log pay? ---


CAPS = [
    Cap(kind="storage_bytes", value=600 * 20),
    Cap(kind="recovery_s", value=90.0),
    Cap(kind="worst_recovery_s", value=95.0),
]


@pytest.mark.parametrize("cap", CAPS, ids=lambda cap: cap.kind)
def test_an_interval_keeps_to_the_cap_and_the_next_one_would_not(cap: Cap) -> None:
    """Saving takes long, so checkpoints would be rare. The model says what the cap's quantity is at an interval."""
    slow: dict[str, Any] = {"checkpoint_stall_s": 1000.0, "machine_mtbf_s": (1e6, 1e6, 2e6, 1e6)}
    for cuts in ((1,), (1, 3), (1, 2, 3)):
        found = report.option(CostModel(profile(**slow)), cuts, cap)
        assert found is not None
        assert found["limited_by_cap"]
        at, above = (
            CostModel(profile(checkpoint_interval_steps=steps, **slow)).costs(cuts)[cap.kind]
            for steps in (found["steps"], found["steps"] + 1)
        )
        assert at <= cap.value * (1 + 1e-9)
        assert above > cap.value


def test_a_cap_that_no_interval_keeps_to_leaves_nothing() -> None:
    model = CostModel(profile())
    assert report.option(model, (), Cap(kind="recovery_s", value=11.0)) is None
    assert report.option(model, (1, 2, 3), Cap(kind="storage_bytes", value=599)) is None
    found = report.build(profile(), Cap(kind="recovery_s", value=11.0))
    assert not found["met"]
    assert (found["interval"]["best"], found["interval"]["log_pays"]) == (None, False)
    assert any("no interval keeps to the cap" in line for line in report.text(found))


def test_the_best_of_all_is_the_best_of_every_choice_and_interval() -> None:
    """Failures are frequent, saving is slow, and the log has room for 9,000 bytes: every boundary for 15 steps."""
    job = profile(checkpoint_stall_s=50.0, machine_mtbf_s=(2e4,) * 4)
    cap = Cap(kind="storage_bytes", value=9000)
    model = CostModel(job)
    found = report.build(job, cap)["interval"]
    tried = [
        (report.pace(model, cuts).useful(steps), steps, cuts)
        for cuts in choices(job)
        for steps in range(1, 400)
        if steps * model.bytes_per_step(cuts) <= cap.value
    ]
    useful, steps, cuts = max(tried)
    assert found["best"]["useful"] == pytest.approx(useful)
    assert (found["best"]["steps"], found["best"]["groups"]) == (steps, len(cuts) + 1)
    assert found["log_pays"]
    alone = max(share for share, _, without in tried if without == ())
    assert found["without_log"]["useful"] == pytest.approx(alone)


def test_a_log_that_slows_every_step_down_does_not_pay() -> None:
    job = profile(log_write_bytes_per_s=1.0, checkpoint_stall_s=1.0)
    found = report.build(job, None)["interval"]
    assert not found["log_pays"]
    assert found["best"]["logged"] == []
    assert found["chosen"]["useful"] < found["without_log"]["useful"]


def test_the_intervals_recovery_is_the_models() -> None:
    """What the interval's formula takes for a recovery in the middle is what the model predicts."""
    model = CostModel(profile(checkpoint_interval_steps=101))
    for cuts in ((), (2,), (1, 2, 3)):
        pace = report.pace(model, cuts)
        middle_s = 101 / 2 * pace.step_s
        assert pace.down_s + pace.ratio * middle_s == pytest.approx(model.expected_recovery_s(cuts))
