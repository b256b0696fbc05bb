"""The frontier is exact: nothing that can be chosen is better, by trying everything."""

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.lab.plan import report
from swift_ft.lab.plan.model import CostModel
from swift_ft.lab.plan.profile import Cap, Profile
from swift_ft.lab.plan.report import Frontier, by_labels, exact, on_grid
from tests.unit.plan.profiles import choices, costs, edge_bytes, group_s, profile, profiles

ROUNDING = 1 + 1e-9


def check(found: Frontier, possible: Sequence[tuple[int, float, int]], resolution: int = 0) -> None:
    """`possible`: (bytes, recovery, boundaries) of every choice."""
    for size, recovery, count in possible:
        fitting = [p for p in found.points if p.edge_bytes <= size + count * resolution]
        assert fitting, (size, recovery)
        assert min(p.recovery_s for p in fitting) <= recovery * ROUNDING, (size, recovery)
    sizes = [point.edge_bytes for point in found.points]
    times = [point.recovery_s for point in found.points]
    assert sizes == sorted(set(sizes))
    assert all(later < earlier for earlier, later in itertools.pairwise(times))


@settings(max_examples=100, deadline=None)
@given(profiles())
def test_nothing_that_can_be_chosen_is_better(drawn: Profile) -> None:
    found = exact(CostModel(drawn))
    assert found.resolution_bytes == 0
    check(found, [(*costs(drawn, cuts), len(cuts)) for cuts in choices(drawn)])
    for point in found.points:
        size, recovery = costs(drawn, point.cuts)
        assert point.edge_bytes == size
        assert point.recovery_s == pytest.approx(recovery)


@settings(max_examples=50, deadline=None)
@given(profiles(), st.floats(0.0, 1.0))
def test_no_group_takes_longer_than_it_may(drawn: Profile, share: float) -> None:
    model = CostModel(drawn)
    worsts = {cuts: max(group_s(drawn, i, j)[0] for i, j in model.bounds(cuts)) for cuts in choices(drawn)}
    low, high = min(worsts.values()), max(worsts.values())
    cap = (low + share * (high - low)) * ROUNDING
    found = exact(model, worst_s=cap)
    allowed = [cuts for cuts, worst in worsts.items() if worst <= cap]
    check(found, [(*costs(drawn, cuts), len(cuts)) for cuts in allowed])
    assert all(model.worst_recovery_s(point.cuts) <= cap for point in found.points)
    assert exact(model, worst_s=low * 0.999).points == ()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 7), st.data())
def test_both_programs_find_the_same(n: int, data: st.DataObject) -> None:
    """On any costs, not only on those of recoveries."""
    values = st.floats(0.0, 100.0) | st.just(math.inf)
    cost = np.full((n, n + 1), np.inf)
    for i in range(n):
        for j in range(i + 1, n + 1):
            cost[i, j] = data.draw(values)
    units = np.array([0, *(data.draw(st.integers(1, 4)) for _ in range(n - 1))])
    results = []
    for chosen in (on_grid(cost, units, int(units.sum())), by_labels(cost, units, 10**6)):
        totals = []
        for cuts in chosen:
            edges = [0, *cuts, n]
            total = 0.0
            for i, j in itertools.pairwise(edges):
                total += cost[i, j]
            totals.append((int(units[list(cuts)].sum()), total))
        results.append(totals)
    assert results[0] == results[1]


@settings(max_examples=50, deadline=None)
@given(profiles(same_sizes=False))
def test_sizes_that_are_rounded_up_cost_no_more_than_is_said(drawn: Profile) -> None:
    model = CostModel(drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "GRID_WORK", 0)
        patch.setattr(report, "GRID_UNITS_PER_MACHINE", 2)
        found = exact(model, candidates_max=0)
    check(found, [(*costs(drawn, cuts), len(cuts)) for cuts in choices(drawn)], found.resolution_bytes)
    for point in found.points:
        assert point.edge_bytes == sum(edge_bytes(drawn, cut) for cut in point.cuts)


def test_arbitrary_sizes_of_many_machines_are_said_to_be_rounded() -> None:
    rng = np.random.default_rng(7)
    n = 60
    sizes = tuple(int(size) for size in rng.integers(10**6, 10**7, n - 1))
    times = tuple(float(t) for t in rng.uniform(1, 3, n))
    many = profile(machines=n, forward_bytes=sizes, backward_s=times, machine_mtbf_s=(1e6,) * n)
    model = CostModel(many)
    whole = exact(model, candidates_max=10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "GRID_WORK", 0)  # two units for each machine: coarse enough to be seen
        rounded = exact(model, candidates_max=1000)
    assert rounded.resolution_bytes > 0 == whole.resolution_bytes
    check(
        rounded, [(p.edge_bytes, p.recovery_s, len(p.cuts)) for p in whole.points], rounded.resolution_bytes
    )
    check(whole, [(p.edge_bytes, p.recovery_s, len(p.cuts)) for p in rounded.points])


@settings(max_examples=60, deadline=None)
@given(profiles(), st.data())
def test_a_cap_is_kept_at_the_least_price(drawn: Profile, data: st.DataObject) -> None:
    model = CostModel(drawn)
    everything = [costs(drawn, cuts) for cuts in choices(drawn)]
    size, recovery = data.draw(st.sampled_from(everything))
    cap = Cap(kind="storage_bytes", value=(size + drawn.other_bytes) * drawn.checkpoint_interval_steps)
    _, cuts, problem = report.choose(model, cap)
    assert problem == ""
    assert model.costs(cuts)["storage_bytes"] <= cap.value
    assert costs(drawn, cuts)[1] <= min(r for s, r in everything if s <= size) * ROUNDING
    cap = Cap(kind="recovery_s", value=recovery * ROUNDING)
    _, cuts, problem = report.choose(model, cap)
    assert problem == ""
    assert costs(drawn, cuts)[1] <= cap.value * ROUNDING
    assert costs(drawn, cuts)[0] <= min(s for s, r in everything if r <= recovery)


# --- a thousand stages ---


def thousand(ranks: int, seed: int, **changes: Any) -> Profile:
    rng = np.random.default_rng(seed)
    machines = 1000 // ranks
    return profile(
        machines=machines,
        ranks=ranks,
        microbatches=128,
        forward_s=tuple(rng.uniform(0.001, 0.002, 1000).tolist()),
        backward_s=tuple(rng.uniform(0.002, 0.004, 1000).tolist()),
        machine_mtbf_s=tuple(rng.uniform(1e6, 3e6, machines).tolist()),
        **changes,
    )


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_thousand_stages(ranks: int) -> None:
    """docs/planning.md has the times."""
    big = thousand(ranks, 5, copies_max=4, gradient_bytes=(100,) * 1000, network_bytes_per_s=1e9)
    document = report.build(big, None)
    assert document["frontier"]["exact"]
    assert len(document["frontier"]["points"]) == big.machines  # every number of groups is worth having
    json.dumps(document, allow_nan=False)  # raises ValueError for what JSON cannot hold
