"""The simulation: against one trial followed by hand, and against the formula where its assumptions hold."""

import heapq
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import pdtr

from swift_ft.lab.goodput import report, simulation, ways
from swift_ft.lab.goodput.cluster import Cluster, Trace, shape_of
from swift_ft.lab.goodput.simulation import Sample, sample, simulate
from tests.unit.plan.goodput.cases import DAY, HOUR, cluster, faults, made, way


def followed(one: ways.Way, size: Cluster, drawn: Sample, row: int) -> dict[str, float]:
    """One trial as a plain loop over its events: a heap of what happens, and no arrays."""

    def part_of(spot: float) -> int:
        return min(int(spot * size.parts), size.parts - 1)

    events: list[tuple[float, int, int, int]] = [(drawn.burn_s, 2, -1, 0), (drawn.until_s, 3, -1, 0)]
    tracked = bool(one.speeds) or one.spares is not None
    away: dict[int, int] = {}  # node, by its number -> part
    if tracked:
        for number, until in enumerate(drawn.begun_until[row]):
            if math.isfinite(until):
                away[-1 - number] = part_of(drawn.begun_spot[row][number])
                events.append((until, 1, -1 - number, 0))
    events += [(at, 0, number, 0) for number, at in enumerate(drawn.at[row])]
    heapq.heapify(events)
    now = place = saved = owed = 0.0
    got = {"useful": 0.0, "stopped": 0.0, "waited": 0.0, "slowed": 0.0, "faults": 0, "busy": 0, "fell": 0}
    hits, fell, counted = 0, False, False
    cycle = one.work_s + one.stall_s
    saved_cycle = cycle if one.by_checkpoint else one.every_s + one.save_s

    def speed() -> float:
        if one.speeds:
            lacking = len(away)
            if one.by_part:
                lacking = max((list(away.values()).count(part) for part in set(away.values())), default=0)
            return one.speeds[min(lacking, len(one.speeds) - 1)]
        return 0.0 if one.spares is not None and len(away) > one.spares else 1.0

    def begin(stop_s: float) -> float:
        return one.fall_stop_s + one.fall_ratio * saved if fell else stop_s + one.ratio * place

    while True:
        at, kind, number, _ = heapq.heappop(events)
        passed, pace = at - now, speed()
        if pace == 0:
            got["waited"] += counted * passed
        else:
            paid = min(owed, passed)
            owed -= paid
            ran = passed - paid
            whole, place = divmod(place + ran * pace, cycle)
            saved = (saved + ran * pace) % saved_cycle
            got["stopped"] += counted * paid
            got["useful"] += counted * whole * cycle
            got["slowed"] += counted * ran * (1 - pace)
        now = at
        busy = owed > 0 or pace == 0
        fell = fell and busy
        if kind == 3:
            break
        if kind == 2:
            counted = True
        elif kind == 1:
            del away[number]
            if one.speeds:
                owed = begin(one.back_s)
        else:
            got["faults"] += 1
            got["busy"] += busy
            lost = False
            if busy:
                if drawn.hit[row][number] * max(1, size.nodes - 1) < one.partners - hits:
                    hits += 1
                    lost = hits >= one.needed
            else:
                hits = 0
            if tracked:
                away[number] = part_of(drawn.spot[row][number])
                heapq.heappush(events, (at + drawn.repair[row][number], 1, number, 0))
                lost = lost or (bool(one.speeds) and speed() == 0)
            got["fell"] += lost and not fell
            fell = fell or lost
            owed = begin(one.stop_s)
    return got


WAYS: list[dict[str, Any]] = [
    {"by_checkpoint": True, "stall_s": 40.0},
    {"ratio": 0.3, "by_checkpoint": True, "stall_s": 5.0, "partners": 2, "needed": 1, "fall_stop_s": 500.0},
    {"work_s": 6.0, "every_s": 3000.0, "save_s": 20.0, "partners": 1, "needed": 1, "fall_stop_s": 300.0},
    {"work_s": 6.0, "every_s": 3000.0, "partners": 7, "needed": 3, "fall_stop_s": 300.0, "fall_ratio": 0.4},
    {"by_checkpoint": True, "spares": 0},
    {"by_checkpoint": True, "spares": 2, "partners": 4, "needed": 2, "fall_stop_s": 30.0},
    {"work_s": 6.0, "every_s": 500.0, "speeds": (1.0, 0.7, 0.4, 0.0), "back_s": 30.0, "fall_stop_s": 200.0},
    {"work_s": 60.0, "every_s": 500.0, "speeds": (1.0, 0.7, 0.0), "by_part": True, "back_s": 30.0},
    {"work_s": 60.0, "every_s": 500.0, "speeds": (1.0, 0.5, 0.0), "ratio": 0.0, "back_s": 9.0},
]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(WAYS),
    st.sampled_from([16, 64, 1024]),
    st.floats(0.002, 3.0),
    st.floats(0.01, 20.0),
    st.sampled_from([0.4, 0.7, 1.0, 3.0]),
    st.integers(0, 10**6),
)
def test_each_trial_is_what_it_is_when_followed_by_hand(
    changes: dict[str, Any],
    ranks: int,
    hours: float,
    repairs: float,
    shape: float,
    seed: int,
) -> None:
    size = cluster(ranks=ranks, replicas=2 if ranks == 16 else 4, stages=2)
    of = faults(mtbf_s=max(1.0, hours * HOUR * size.nodes), shape=shape)
    drawn = sample(of, size, repairs * of.job_mtbf_s(size), seed=seed, trials=5, span=30.0)
    one = way(**changes)
    outcome = simulate(one, size, drawn)
    trials = [followed(one, size, drawn, row) for row in range(5)]
    counted_s = drawn.until_s - drawn.burn_s
    for row, trial in enumerate(trials):
        assert outcome.shares[row] == pytest.approx(
            trial["useful"] * one.share_of_runs / counted_s, rel=1e-6, abs=1e-9
        )
    for name in ("stopped", "waited", "slowed"):
        mean = sum(trial[name] for trial in trials) / 5 / counted_s
        assert getattr(outcome, name) == pytest.approx(mean, rel=1e-6, abs=1e-9), name
    assert outcome.faults == sum(trial["faults"] for trial in trials)
    assert outcome.in_recovery == sum(trial["busy"] for trial in trials)
    assert outcome.fell == sum(trial["fell"] for trial in trials)
    spent = outcome.stopped + outcome.waited + outcome.slowed + outcome.useful / one.share_of_runs
    assert spent == pytest.approx(1.0, abs=1e-9 + (one.work_s + one.stall_s) / counted_s)


@pytest.mark.parametrize("ranks", [1024, 16384, 131072])
@pytest.mark.parametrize("days", [60.0, 264.0])
def test_formula_and_simulation_agree_where_the_formula_holds(ranks: int, days: float) -> None:
    """Four standard errors: of the 70 comparisons none is further off by chance."""
    size, of = cluster(ranks=ranks, replicas=ranks // 128), faults(mtbf_s=days * DAY)
    repair_s = 5 * DAY
    drawn = sample(of, size, repair_s, seed=11)
    for name, one in made(size, of, every_s=HOUR).items():
        if name == ways.WAIT:  # it waits, and faults go on meanwhile
            continue
        outcome = simulate(one, size, drawn)
        off = outcome.useful - report.useful_share(one, size, of, repair_s)
        bound = 4 * outcome.error / simulation.SIGMA_95 + 1e-4
        if one.speeds:  # missing nodes and stops are not quite independent
            bound += 2e-3
        assert abs(off) < bound, (name, off, bound)


@pytest.mark.parametrize(("ranks", "hours"), [(16, 5.0), (64, 12.0)])
def test_they_agree_in_small_clusters_of_whole_models(ranks: int, hours: float) -> None:
    size = cluster(ranks=ranks, ranks_per_node=1, replicas=ranks, stages=1)
    of = faults(mtbf_s=hours * HOUR * ranks)
    drawn = sample(of, size, 4 * HOUR, seed=3)
    found = made(size, of)
    assert {ways.DROP, ways.LOSSY} <= found.keys()
    for name in (ways.RESTART, ways.REINIT, ways.REPLICA, ways.SHRINK, ways.ADAPTIVE, ways.DROP, ways.LOSSY):
        outcome = simulate(found[name], size, drawn)
        off = outcome.useful - report.useful_share(found[name], size, of, 4 * HOUR)
        assert abs(off) < 4 * outcome.error / simulation.SIGMA_95 + 1e-3, name


def test_missing_nodes_are_as_many_as_palm_says() -> None:
    """Without stops, a job whose speed falls by a 200th with each missing node loses their mean number."""
    size, of = cluster(), faults()
    drawn = sample(of, size, 60 * HOUR, seed=5, trials=800)
    one = way(stop_parts=(), work_s=1e-6, speeds=tuple(1 - k / 200 for k in range(201)))
    outcome = simulate(one, size, drawn)
    expected = 60 * HOUR / of.job_mtbf_s(size) / 200
    assert abs(outcome.slowed - expected) < 4 * outcome.error / simulation.SIGMA_95


def test_a_second_loss_that_takes_the_copy_falls_back() -> None:
    """With two nodes every fault in a recovery takes the partner; with many hardly one does."""
    of = faults(mtbf_s=2 * HOUR)
    for ranks, certain in ((16, True), (1024, False)):
        size = cluster(ranks=ranks, replicas=2 if certain else 8, stages=8)
        many = faults(mtbf_s=of.mtbf_s * size.nodes / 2)
        drawn = sample(many, size, HOUR, seed=7)
        one = way(stop_parts=(("stop", 900.0),), partners=1, needed=1, fall_stop_s=2000.0)
        outcome = simulate(one, size, drawn)
        assert outcome.in_recovery > 1000
        if certain:
            assert outcome.fell > 0.4 * outcome.in_recovery
        else:
            assert outcome.fell < 0.03 * outcome.in_recovery


@pytest.mark.parametrize("cv", [0.5, 1.0, 1.76])
def test_times_between_faults_have_their_mean_and_variation(cv: float) -> None:
    of = faults(shape=shape_of(cv))
    gaps, repairs = simulation._drawn(of, np.random.default_rng(1), 4000, 50)
    assert gaps[:, 1:].mean() == pytest.approx(1.0, abs=0.02)
    assert gaps[:, 1:].std() == pytest.approx(cv, rel=0.03)
    # A moment is more likely in a long time than in a short one (the inspection paradox).
    assert gaps[:, 0].mean() == pytest.approx((1 + cv**2) / 2, rel=0.1)
    assert repairs.mean() == pytest.approx(1.0, abs=0.02)


def test_a_trace_is_played_in_its_order_from_any_of_its_faults() -> None:
    traced = Trace(gaps_s=(1.0, 2.0, 3.0, 6.0), outages_s=(10.0, 20.0, 30.0, 60.0), nodes=4)
    gaps, repairs = simulation._drawn(faults(trace=traced), np.random.default_rng(1), 400, 9)
    order = [1 / 3, 2 / 3, 1.0, 2.0]
    for row in range(400):
        first = order.index(min(order, key=lambda value: abs(value - repairs[row, 0])))
        turned = [order[(first + k) % 4] for k in range(9)]
        assert list(repairs[row]) == pytest.approx(turned)
        assert list(gaps[row, 1:]) == pytest.approx(turned[1:])
        assert 0 <= gaps[row, 0] <= turned[0]
    # A moment is in a gap as often as the gap is long.
    shares = [float(np.isclose(repairs[:, 0], value).mean()) for value in order]
    assert shares == pytest.approx([1 / 12, 2 / 12, 3 / 12, 6 / 12], abs=0.08)


def test_the_same_seed_is_the_same_outcome_and_another_one_is_not() -> None:
    size, of = cluster(), faults()
    outcomes = [simulate(way(), size, sample(of, size, HOUR, seed=seed)).useful for seed in (4, 4, 5)]
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_spares_needed_is_the_quantile_of_the_missing() -> None:
    size, of = cluster(), faults()
    missing = 50 * HOUR / of.job_mtbf_s(size)
    needed = simulation.spares_needed(sample(of, size, 50 * HOUR, seed=1, trials=2000))
    assert pdtr(needed - 2, missing) < 0.999 < pdtr(needed + 2, missing)


def test_faults_that_follow_each_other_closely_cost_less_of_a_long_recovery() -> None:
    """What the formula cannot know: with clusters of faults, more of them fall into one recovery."""
    size = cluster()
    one = way(stop_parts=(("stop", 5000.0),), by_checkpoint=True)
    shares = []
    for cv in (0.5, 1.0, 3.0):
        of = faults(mtbf_s=128 * 3 * HOUR, shape=shape_of(cv))
        shares.append(simulate(one, size, sample(of, size, HOUR, seed=2)).useful)
    assert shares == sorted(shares)
